"""Which exits pay here: heads solved for by least squares, replayed and priced (PAPERS 2.9)."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from verdraft.model.exit_file import TrainedHead, assemble
from verdraft.model.exit_head import TokenIds
from verdraft.model.transformer import Transformer
from verdraft.spec.spending import CostTable
from verdraft.train.adapter import Adapter
from verdraft.train.choose import Exit, Times, early_exit_speed, hierarchical_speed, measure_head, measure_times
from verdraft.train.distil import Recipe, Target, judge, solved
from verdraft.train.replay import early_exit_cycles, greedy_trace, hierarchical_cycles

ROWS = 40_000  # enough to rank candidates
LENGTHS = (1, 2, 3, 4)  # of early-exit drafts
WINDOWS = ((1, 2), (1, 3), (2, 2), (2, 4), (2, 6), (4, 8))  # N_d, N_i


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may be chosen; two layers, one vocabulary and one width leave no choice."""

    layers: tuple[int, ...]
    vocabularies: tuple[int, ...]
    inners: tuple[int, ...]

    def pairs(self) -> list[tuple[int, int]]:
        """Every L_d < L_i."""
        return list(itertools.combinations(sorted(set(self.layers)), 2))

    @property
    def decided(self) -> bool:
        return len(self.layers) == 2 and len(self.vocabularies) == len(self.inners) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One line of the table; speeds are relative to plain decoding, at batch 1, by the cost model."""

    layers: tuple[int, int]
    vocabulary: int
    inner: int
    draft_agreement: float
    check_agreement: float
    length: int  # of the best early-exit draft
    early_exit: float
    window: tuple[int, int]  # the best N_d, N_i
    acceptance: float  # of window tokens by the last segment
    hierarchical: float

    @property
    def speed(self) -> float:
        return max(self.early_exit, self.hierarchical)


def sweep(
    model: Transformer,
    path: Path,
    rows: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    target_of: Callable[[int], Target],
    candidates: Candidates,
    recipe: Recipe,
    progress: bool = True,
) -> list[Choice]:
    """All candidates, the quickest first. A smaller vocabulary is the larger one's head without some columns."""
    some = thinned(rows, ROWS)
    largest = target_of(max(candidates.vocabularies))
    times = measure_times(model)
    choices = []
    for inner in candidates.inners:
        sized = replace(recipe, inner=inner)
        layers = tqdm(candidates.layers, desc=f"solving heads of width {inner}", disable=not progress)
        heads = {layer: solved(some, layer, largest, sized) for layer in layers}
        for size in candidates.vocabularies:
            ids = target_of(size).token_ids
            chosen = {layer: judge(head, held, layer, largest, ids).chosen for layer, head in heads.items()}
            cost = head_cost(model, path, ids, next(iter(heads.values())))
            choices += [
                _price(times, cost, held, (pair, size, inner), (chosen[pair[0]], chosen[pair[1]]))
                for pair in candidates.pairs()
            ]
    return sorted(choices, key=lambda choice: -choice.speed)


def thinned(rows: Mapping[str, Tensor], limit: int) -> dict[str, Tensor]:
    """At most `limit` of the rows, evenly spread."""
    step = max(1, -(-len(rows["next"]) // limit))
    return {name: column[::step] for name, column in rows.items()}


def head_cost(model: Transformer, path: Path, token_ids: TokenIds, adapter: Adapter) -> CostTable:
    """What such a head takes here; its layer does not matter."""
    one, two = (TrainedHead(layer, token_ids, adapter.weights()) for layer in (1, 2))
    return measure_head(model, assemble((one, two), model, path).draft)


def _price(
    times: Times,
    cost: CostTable,
    held: Mapping[str, Tensor],
    what: tuple[tuple[int, int], int, int],
    chosen: tuple[TokenIds, TokenIds],
) -> Choice:
    layers, size, inner = what
    trace = greedy_trace(held, *chosen)
    draft, check = (Exit(layer, cost) for layer in layers)
    early = {n: early_exit_speed(times, draft, n, early_exit_cycles(trace, n)) for n in LENGTHS}
    windows = {w: hierarchical_cycles(trace, *w) for w in WINDOWS}
    both = {w: hierarchical_speed(times, draft, check, w[0], cycles) for w, cycles in windows.items()}
    length, window = max(early, key=early.__getitem__), max(both, key=both.__getitem__)
    return Choice(
        layers=layers,
        vocabulary=size,
        inner=inner,
        draft_agreement=float(trace.draft_right.mean()),
        check_agreement=float(trace.check_right.mean()),
        length=length,
        early_exit=early[length],
        window=window,
        acceptance=windows[window].acceptance,
        hierarchical=both[window],
    )


def table(choices: Sequence[Choice]) -> str:
    """For people; the first line of `choices` is the recommendation."""
    lines = [
        "L_d L_i vocabulary inner  agree_d agree_i | early exit: N  speed | hierarchical: N_d N_i accepted  speed",
        *(
            f"{c.layers[0]:3} {c.layers[1]:3} {c.vocabulary:10} {c.inner:5}  {c.draft_agreement:7.1%} "
            f"{c.check_agreement:7.1%} | {c.length:13} {c.early_exit:6.2f} | {c.window[0]:17} {c.window[1]:3} "
            f"{c.acceptance:8.1%} {c.hierarchical:6.2f}"
            for c in choices
        ),
    ]
    best = choices[0]
    lines.append(
        f"recommended: layers {best.layers[0]},{best.layers[1]}, vocabulary {best.vocabulary}, inner {best.inner} "
        f"({best.speed:.2f} of plain decoding's speed at batch 1, by the cost model)"
    )
    return "\n".join(lines)

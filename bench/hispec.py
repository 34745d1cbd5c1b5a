"""`python -m verdraft.bench.hispec [MODEL] --exits FOLDER|D,I --data FOLDER`: what drafting with early exits brings.

Tables of agreement, acceptance, passes, speed at several batch sizes, ablations, memory and break-even; all ways to
decode take turns on the same prompts, and the run fails when two of them differ about a token.
"""

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from verdraft.bench.exit_runs import Bench, Result, Setting
from verdraft.bench.kernel_flags import add_kernel_flags, kernels_of
from verdraft.bench.memory import Span, tensor_bytes
from verdraft.bench.plot import Points, line_charts
from verdraft.bench.prompts import add_data_flags, prompts_of
from verdraft.bench.synthetic import Shape, write_model
from verdraft.bench.timing import CPU, add_time_flags, use_time_flags
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.exit_file import load_exits, shipped_exits
from verdraft.model.exit_head import Exits, own_exits
from verdraft.model.load import load_model
from verdraft.model.source import resolve_model
from verdraft.model.transformer import Transformer
from verdraft.spec.window import Cycle

PARTS = ("agreement", "speed", "ablation", "memory", "model", "synthetic")
ROUNDS, WINDOWS = (2, 4, 6, 8), (4, 8, 12, 16)
DEPTH_SCALES = (0.02, 0.05, 0.1, 0.2)

Workloads = Mapping[str, Sequence[Sequence[int]]]


def main() -> None:
    args = parse()
    use_time_flags(args)
    path = resolve_model(args.model)
    model = load_model(path, kernels_of(args), torch.float32, CPU)
    bench = Bench(model, exits_of(args.exits, model, path), args.max_tokens)
    if not bench.exits:
        raise SystemExit("--exits: no heads come with this model; name a folder or two layers")
    report = Report(args, path, bench, read_workloads(args, path, args.prompts))
    for part in args.parts:
        getattr(report, part)()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verdraft.bench.hispec", description=__doc__)
    parser.add_argument("model", nargs="?", help="folder, hub id or .gguf file; default: the demo model")
    parser.add_argument("--exits", default="auto", help="as for `verdraft serve`")
    parser.add_argument("--depths", nargs="*", default=[], help="more exits, for the ablation over the depth of L_i")
    add_kernel_flags(parser)
    parser.add_argument("--prompts", type=int, default=4, help="of each workload")
    parser.add_argument("--max-tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--plot", type=Path, default=Path("hispec.svg"), help="where the ablation is drawn")
    parser.add_argument("--layers", type=int, default=48, help="depth of the synthetic model")
    add_time_flags(parser)
    add_data_flags(parser)
    return parser.parse_args()


def exits_of(spec: str, model: Transformer, path: Path) -> Exits:
    """As the server's --exits."""
    if spec == "auto":
        return shipped_exits(model, path)
    if layers := re.fullmatch(r"(\d+),(\d+)", spec):
        return own_exits(model, (int(layers[1]), int(layers[2])))
    return load_exits(Path(spec), model, path)


def read_workloads(args: argparse.Namespace, path: Path, count: int) -> Workloads:
    """Token ids of the first `count` prompts of each workload."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    found: dict[str, list[list[int]]] = defaultdict(list)
    for prompt in prompts_of(args):
        if len(found[prompt.workload]) < count:
            text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
            found[prompt.workload].append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return found


def modes(window: int = 4, round_len: int = 2) -> list[Setting]:
    """Plain decoding and the two ways to draft with exits."""
    return [
        Setting("off", "off"),
        Setting("early_exit", "early_exit", window),
        Setting("hispec", "hispec", window, round_len),
    ]


@dataclass(frozen=True, slots=True)
class Report:
    """Each method prints one part."""

    args: argparse.Namespace
    path: Path
    bench: Bench
    workloads: Workloads

    @property
    def prompts(self) -> list[Sequence[int]]:
        """One of each workload in turn."""
        rows = zip(*self.workloads.values(), strict=False)
        return [prompt for row in rows for prompt in row]

    def agreement(self) -> None:
        """Per workload: what the exits know, what the full model keeps, and how many passes that takes."""
        layers = ", ".join(str(head.layer) for head in self.bench.exits.heads)
        print(f"\nexits at {layers}; N_d 2, N_i 4; agreement with the target's first choice, acceptance, passes")
        print(f"{'workload':14} {'L_d':>6} {'L_i':>6} | {'kept':>6} {'kept':>6} | passes per 1,000 tokens, batch 1")
        print(f"{'':14} {'':>6} {'':>6} | {'early':>6} {'hispec':>6} | {'early_exit':>16} {'hispec':>16}")
        for name, prompts in self.workloads.items():
            found = self.bench.turns(modes(), prompts, 1)
            pairs = zip(prompts, found["off"].outputs, strict=True)
            counts = [sum(column) for column in zip(*(self.bench.agreement(*pair) for pair in pairs), strict=True)]
            rates = " ".join(f"{100 * right / counts[2]:5.1f}%" for right in counts[:2])
            kept = " ".join(f"{100 * found[mode].acceptance:5.1f}%" for mode in ("early_exit", "hispec"))
            passes = " ".join(f"{self._passes(found[mode]):>16}" for mode in ("early_exit", "hispec"))
            print(f"{name:14} {rates} | {kept} | {passes}", flush=True)

    def _passes(self, result: Result) -> str:
        firsts = (0, *(head.layer for head in self.bench.exits.heads))
        return " ".join(f"{1000 * result.passes[first] / result.tokens:.0f}" for first in firsts)

    def speed(self) -> None:
        """Decode tokens a second as ratios to plain decoding, windows always filled and as the server would."""
        costs = self.bench.measured()
        served = [Setting(f"{mode}*", mode, costs=costs) for mode in ("early_exit", "hispec")]
        print("\ndecode tokens/s and the ratio to off; *: no longer than pays, given up below break-even")
        print(f"{'batch':>5} {'off':>8} {'early_exit':>11} {'hispec':>8} {'early_exit*':>12} {'hispec*':>8}")
        for batch in self.args.batches:
            prompts = self.prompts[: max(batch, len(self.prompts) // batch * batch)]
            found = self.bench.turns([*modes(), *served], prompts, batch)
            ratios = [found[name].rate / found["off"].rate for name in list(found)[1:]]
            print(f"{batch:5} {found['off'].rate:8.1f} " + "".join(f"{r:9.2f}x" for r in ratios), flush=True)

    def ablation(self) -> None:
        """N_d and N_i, and the depth of L_i when more exits were named; as tables and as a plot."""
        rounds = [Setting(f"{n}", "hispec", max(4, n), n) for n in ROUNDS]
        windows = [Setting(f"{n}", "hispec", n, 2) for n in WINDOWS]
        charts = {
            "N_d (N_i = 4, or N_d if more)": self._ablate("N_d", self.bench, rounds),
            "N_i (N_d = 2)": self._ablate("N_i", self.bench, windows),
        }
        depths = [self.bench.exits, *(exits_of(e, self.bench.model, self.path) for e in self.args.depths)]
        if len(depths) > 1:
            charts["layer of L_i"] = self._depths(depths)
        line_charts(self.args.plot, charts, "hispec / off")
        print(f"plot: {self.args.plot}")

    def _ablate(self, name: str, bench: Bench, settings: Sequence[Setting]) -> dict[str, Points]:
        print(f"\nhispec by {name}: ratio of tokens/s to off, share of window tokens kept, tokens per target pass")
        speed, kept = [], []
        found = bench.turns([Setting("off", "off"), *settings], self.prompts, 1)
        for setting in settings:
            result = found[setting.name]
            ratio = result.rate / found["off"].rate
            per_pass = result.tokens / result.target_passes
            print(f"{setting.name:>5} {ratio:6.2f}x {result.acceptance:7.1%} {per_pass:6.2f}", flush=True)
            speed.append((float(setting.name), ratio))
            kept.append((float(setting.name), result.acceptance))
        return {"speed": speed, "kept": kept}

    def _depths(self, exits: Sequence[Exits]) -> dict[str, Points]:
        lines: dict[str, list[tuple[float, float]]] = {"speed": [], "kept": []}
        for each in sorted(exits, key=lambda e: e.check.layer):
            bench = Bench(self.bench.model, each, self.bench.max_tokens)
            layer = float(each.check.layer)
            found = self._ablate(f"exits {each.draft.layer},{each.check.layer}, N_i", bench, [Setting("4", "hispec")])
            for name, points in found.items():
                lines[name].append((layer, points[0][1]))
        return dict(lines)

    def memory(self) -> None:
        """What the hierarchy takes beside weights and KV, at 16 sequences of 1,024 tokens."""
        model, sequences, length = self.bench.model, 16, 1024
        seen: set[Span] = set()
        weights = tensor_bytes(model, seen)
        heads = tensor_bytes(self.bench.exits, seen)
        kv = sequences * length * model.kv_bytes_per_token
        rows = sequences * (modes()[2].window + 1)  # each waits at one boundary at a time
        buffers = rows * model.config.hidden_size * model.dtype.itemsize
        print(f"\n{sequences} sequences of {length} tokens: weights {weights / 1e6:.0f} MB, KV {kv / 1e6:.0f} MB")
        for name, size in (("buffered hidden states", buffers), ("heads", heads)):
            print(f"{name}: {size / 1e6:.3f} MB, {size / (weights + kv):.4%}")

    def model(self) -> None:
        """Break-even by the cost model of PAPERS 2.9 with the times measured here."""
        costs = self.bench.measured().exits
        print("\nby the cost model, batch 1: ratio to plain decoding of the best window up to 8, by agreement")
        print(f"{'agreement':>9} {'early_exit':>14} {'hispec':>14}   (length of the window)")
        for step in range(2, 20):
            cells = []
            for cycle in (Cycle(8, 2, False), Cycle(8, 2, True)):
                best = costs.best_length(cycle, step / 20, step / 20)
                ratio = costs.speed(cycle, best, step / 20, step / 20) / costs.speed(cycle, 0, 0, 0)
                cells.append(f"{ratio:8.2f}x ({best})")
            print(f"{step / 20:9.2f} {cells[0]:>14} {cells[1]:>14}", flush=True)
        for name, table in (("L_d", costs.draft_head), ("L_i", costs.check_head)):
            print(f"head {name}: {table.of(1) / costs.full.of(1):.1%} of a pass of one token")

    def synthetic(self) -> None:
        """The same on a deeper random model whose exits agree as often as its later layers add little."""
        shape = Shape(self.args.layers)
        exits = (max(1, shape.layers // 8), max(2, shape.layers // 4))
        print(f"\nsynthetic model, {shape.layers} layers, exits at {exits[0]},{exits[1]}, batch 1, temperature 0.7")
        print(f"{'scale':>6} {'kept early':>11} {'hispec':>7} | {'early_exit':>11} {'hispec':>8}")
        for scale, bench in synthetic_models(shape, exits, self.args.max_tokens):
            prompts = [[(7 * i + 13 * j) % 8000 + 1 for j in range(16)] for i in range(3)]
            found = bench.turns(modes(), prompts, 1)
            kept = f"{found['early_exit'].acceptance:11.1%} {found['hispec'].acceptance:7.1%}"
            ratios = [found[mode].rate / found["off"].rate for mode in ("early_exit", "hispec")]
            print(f"{scale:6.2f} {kept} | {ratios[0]:10.2f}x {ratios[1]:7.2f}x", flush=True)


def synthetic_models(shape: Shape, layers: tuple[int, int], max_tokens: int) -> Iterator[tuple[float, Bench]]:
    """Models of one shape, by the scale of what their later layers add."""
    for scale in DEPTH_SCALES:
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(Path(folder), shape, scale)
            model = load_model(path, choose_kernels("cpu", CPU, torch.float32, "none"), torch.float32, CPU)
        yield scale, Bench(model, own_exits(model, layers), max_tokens, temperature=0.7)


if __name__ == "__main__":
    main()

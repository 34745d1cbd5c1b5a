"""What trained heads are worth on held-out prompts: losses, agreement with the target, acceptance in replay."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verdraft.model.exit_head import TokenIds
from verdraft.train.distil import Judged
from verdraft.train.replay import Cycles, early_exit_cycles, greedy_trace, hierarchical_cycles

WINDOW = (2, 4)  # N_d and N_i by default


def validate(
    rows: Mapping[str, Tensor], sources: Sequence[str], token_ids: TokenIds, draft: Judged, check: Judged
) -> dict[str, Any]:
    """Figures for the record, over the rows that the model wrote itself; `sources[s]` is where prompt s comes from.

    Agreement is with the target's first choice, of whatever temperature wrote the text; replay takes greedy text.
    """
    own = rows["own"].numpy()
    first = rows["argmax"].numpy()[own]
    agree = {"draft": draft.chosen[own] == first, "check": check.chosen[own] == first}
    origin = np.array(sources)[rows["sequence"].numpy()[own]]
    trace = greedy_trace(rows, draft.chosen, check.chosen)
    return {
        "rows": int(own.sum()),
        "coverage": _share(np.isin(first, token_ids)),
        "losses": {"draft": asdict(draft.losses), "check": asdict(check.losses)},
        "agreement": {name: _share(flags) for name, flags in agree.items()},
        "agreement_by_source": {
            str(source): {name: _share(flags[origin == source]) for name, flags in agree.items()}
            for source in np.unique(origin)
        },
        "replay": {
            "early_exit_2": _cycles(early_exit_cycles(trace, 2)),
            "hierarchical_2_4": _cycles(hierarchical_cycles(trace, *WINDOW)),
            "draft_alone_4": _cycles(early_exit_cycles(trace, 4)),
        },
    }


def _cycles(cycles: Cycles) -> dict[str, float]:
    return {"tokens_per_cycle": round(cycles.tokens_per_cycle, 3), "acceptance": round(cycles.acceptance, 3)}


def _share(flags: NDArray[np.bool_]) -> float:
    return round(float(flags.mean()), 4)

"""`python -m verdraft.bench.gpu`: what GPU kernels, whole passes and an engine cost, each beside its floor.

Every part runs in a process of its own, with a time of its own: one that fails, hangs or breaks the device costs a note
and nothing else. The JSON file is written after every part; a short table comes last. `--device cpu` runs every part
with tiny sizes, to show that it runs: those times mean nothing.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from verdraft.bench.gpu_form import forms
from verdraft.bench.gpu_jobs import Result, Setting, plan, run
from verdraft.bench.gpu_parts import FULL, REHEARSAL
from verdraft.bench.gpu_table import table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="verdraft.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--seconds", type=float, default=280.0, help="after which what is left is skipped")
    parser.add_argument("--layers", type=int, help="of the model (default: all 32, on a CPU 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, as a rehearsal")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --device cpu rehearses")
    sizes = FULL if args.device == "cuda" else REHEARSAL
    if args.layers:
        sizes = replace(sizes, config=replace(sizes.config, num_layers=args.layers))
    setting = Setting(torch.device(args.device), sizes)
    result = Result(args.out, torch.cuda.get_device_name() if setting.on_gpu else "cpu")
    run(list(plan(forms(setting.device, setting.dtype))), setting, args.seconds, result)
    print("\n".join(table(result.lines)))


if __name__ == "__main__":
    main()

"""The flags of benchmarks that say how weights are packed and what they are multiplied with."""

import argparse
from typing import get_args

import torch

from verdraft.kernels.base import Kernels
from verdraft.kernels.blocks import Activations, Quantization
from verdraft.kernels.chooser import choose_kernels


def add_kernel_flags(parser: argparse.ArgumentParser) -> None:
    """As for `verdraft serve`; read them with `kernels_of`."""
    for name, choices, default in (("quantization", Quantization, "auto"), ("activations", Activations, "float")):
        parser.add_argument(f"--{name}", choices=get_args(choices), default=default, help="as for `verdraft serve`")


def kernels_of(args: argparse.Namespace) -> Kernels:
    """The CPU's kernels in float32. Raises KernelUnavailable."""
    return choose_kernels("cpu", torch.device("cpu"), torch.float32, args.quantization, activations=args.activations)

"""The demo model's own weights: a row has the bits that it has alone, whatever rows stand beside it and in which order,
on one thread and on two, in fp32 and in blocks; and so has a token, however its prompt is cut."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from verdraft.kernels.base import Batch, Kernels
from verdraft.kernels.blocks import Activations, Quantization
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.config import read_config
from verdraft.model.load import load_model
from verdraft.model.weights import open_weights

pytestmark = pytest.mark.demo

CPU = torch.device("cpu")
MAX_ROWS = 130
SOME = (1, 5, 12, 13, 25, 130)  # around the bounds of tiles, of early fetching and of the blocks' use
ALL = range(1, MAX_ROWS + 1)
FORMS: list[tuple[Quantization, Activations]] = [
    *(("none", "float"), ("auto", "float"), ("int8", "float"), ("int4", "float")),
    *(("auto", "int8"), ("int8", "int8"), ("int4", "int8")),
]
LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class Form:
    """How the weights are packed and what they are multiplied with."""

    quantization: Quantization
    activations: Activations

    def kernels(self) -> Kernels:
        return choose_kernels("cpu", CPU, torch.float32, self.quantization, activations=self.activations)


@pytest.fixture(params=FORMS, ids=" ".join)
def form(request: pytest.FixtureRequest) -> Form:
    return Form(*request.param)


def matrices(path: Path, layer: int, lossy: bool) -> dict[str, Tensor]:
    """A linear of each shape, and part of the head. `lossy`: so changed that no blocks hold them exactly."""
    config = read_config(path)
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = [(hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
    names = [f"model.layers.{layer}.{name}.weight" for name in LINEARS]
    with open_weights(path, torch.float32, CPU) as weights:
        found = {name: weights.take(name, *shape) for name, shape in zip(names, shapes, strict=True)}
        found["head"] = weights.take("model.embed_tokens.weight", config.vocab_size, hidden)[:3000]
    return {name: weight * 1.1 if lossy else weight for name, weight in found.items()}


def check_linear(kernels: Kernels, weight: Tensor, counts: Sequence[int], shuffle: random.Random) -> None:
    """Rows of these numbers in any order, on one thread and on two in turns, against each row alone."""
    x = torch.randn(MAX_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)) * 3
    packed = kernels.pack(weight)
    alone = torch.cat([kernels.linear(row, packed) for row in x.split(1)])
    for count in counts:
        order = torch.tensor(shuffle.sample(range(MAX_ROWS), count))
        torch.set_num_threads(3 - torch.get_num_threads())
        assert torch.equal(kernels.linear(x[order], packed), alone[order]), count


def test_rows_of_every_linear(demo_path: Path, form: Form) -> None:
    kernels = form.kernels()
    for weight in matrices(demo_path, 3, lossy=form.quantization in ("int8", "int4")).values():
        check_linear(kernels, weight, SOME, random.Random(1))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layer", [0, 29])
@pytest.mark.parametrize("lossy", [False, True])
def test_rows_of_every_linear_in_every_number(demo_path: Path, form: Form, layer: int, lossy: bool) -> None:
    if lossy and form == Form("auto", "int8"):
        pytest.skip("no blocks hold these weights exactly")
    kernels = form.kernels()
    for weight in matrices(demo_path, layer, lossy).values():
        for turn in range(2):  # with either number of threads
            check_linear(kernels, weight, ALL[turn:], random.Random(2))


class Sequences:
    """Prompts that run through the demo model and pages of their own, a few tokens at a time."""

    def __init__(self, path: Path, kernels: Kernels) -> None:
        self.model = load_model(path, kernels, torch.float32, CPU)
        self.pages = -(-MAX_ROWS // 16)
        self.pool = self.model.new_pool(2 * self.pages, 16)

    @torch.inference_mode()
    def feed(self, tokens: Tensor, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Logits of tokens[b, starts[b]:ends[b]] of every sequence b in one pass."""
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        batch = Batch(
            cu_q=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            pages=torch.arange(len(counts) * self.pages, dtype=torch.int32).view(len(counts), -1),
            slots=sequence * self.pages * 16 + positions,
            positions=positions,
            max_q=max(counts),
            max_k=max(ends),
        )
        hidden = self.model.embed(tokens[sequence, positions], positions)
        return self.model.logits(self.model.forward(hidden, batch, self.pool, 0, self.model.config.num_layers))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_token_s_logits_wherever_its_prompt_is_cut(demo_path: Path, form: Form) -> None:
    """Two prompts in one batch, each cut anywhere, against each token alone: every kernel on the way to its logits."""
    length, rounds = MAX_ROWS, 20
    sequences, shuffle = Sequences(demo_path, form.kernels()), random.Random(3)
    tokens = torch.randint(0, 49152, (2, length), generator=torch.Generator().manual_seed(0))
    alone = [[sequences.feed(tokens[b : b + 1], [i], [i + 1]) for i in range(length)] for b in (0, 1)]
    for round_ in range(rounds):
        torch.set_num_threads(1 + round_ % 2)
        places = [0, 0]
        while places != [length, length]:
            ends = [min(length, place + shuffle.choice((0, 1, 2, 4, 11, 14, 40))) for place in places]
            if ends == places:
                continue
            expected = torch.cat([row for b in (0, 1) for row in alone[b][places[b] : ends[b]]])
            assert torch.equal(sequences.feed(tokens, places, ends), expected), (places, ends)
            places = ends

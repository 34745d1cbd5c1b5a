"""Products, small operations and sampling on the GPU: against float64 or the CPU, bit for bit where that is meant."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verdraft.kernels import torch_sampling
from verdraft.kernels.base import Kernels
from verdraft.kernels.blocks import Quantization, quantize
from verdraft.kernels.chooser import choose_kernels, choose_sampler
from verdraft.kernels.draws import Draws
from verdraft.kernels.float8 import round_to_float8
from verdraft.kernels.noise import Noise
from verdraft.kernels.sampling import LogitParams, TokenHistory, choose_token, row_logprobs
from verdraft.kernels.torch_logprobs import logprobs

ROWS = (*range(1, 18), 32, 64, 65, 128, 129, 255, 256)
SHAPES = [(576, 960), (1536, 576), (1000, 333), (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]


def randn(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
def test_a_rows_product_does_not_depend_on_their_number(
    quantization: Quantization, ins: int, outs: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows of very different sizes, as real activations have."""
    exact = choose_kernels("auto", device, dtype, quantization, deterministic=True)
    x = (randn(256, ins, device=device) * randn(256, 1, device=device, seed=1).exp()).to(dtype)
    weight = (randn(outs, ins, device=device, seed=2) * ins**-0.5).to(dtype)
    packed = exact.pack(weight)
    alone = torch.cat([exact.linear(row, packed) for row in x.split(1)])
    torch.testing.assert_close(alone.double(), F.linear(x.double(), _kept(weight, quantization)), rtol=0.02, atol=0.02)
    flips = {rows: int((exact.linear(x[:rows], packed) != alone[:rows]).sum()) for rows in ROWS}
    assert not any(flips.values()), f"outputs with other bits, by rows: {flips}"


def _kept(weight: Tensor, quantization: Quantization) -> Tensor:
    """What is multiplied in its place, in float64."""
    match quantization:
        case "int8":
            weight = quantize(weight.float(), 8).expand().to(weight.dtype)
        case "fp8":
            weight = round_to_float8(weight).expand()
    return weight.double()


@pytest.mark.parametrize("width", [128, 576, 4096, 14336])
def test_small_operations(exact: Kernels, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = (randn(70, width, device=device, seed=seed).to(dtype) for seed in range(3))
    wide, scale = x.double(), weight[0].double()
    expected = {
        "rms_norm": F.rms_norm(wide, (width,), scale, 1e-5),
        "add_rms_norm": F.rms_norm((x + residual).double(), (width,), scale, 1e-5),
        "silu_mul": F.silu(wide[:, : width // 2]) * wide[:, width // 2 :],
    }
    found = {
        "rms_norm": lambda x, r: exact.rms_norm(x, weight[0], 1e-5),
        "add_rms_norm": lambda x, r: exact.add_rms_norm(x.clone(), r, weight[0], 1e-5),
        "silu_mul": lambda x, r: exact.silu_mul(x),
    }
    for name, op in found.items():
        whole = op(x, residual)
        torch.testing.assert_close(whole.double(), expected[name], rtol=0.01, atol=0.01, msg=name)
        alone = torch.cat([op(*pair) for pair in zip(x.split(1), residual.split(1), strict=True)])
        assert torch.equal(alone, whole), name


def test_rotation_into_the_pool_and_moves(exact: Kernels, half: torch.dtype, device: torch.device) -> None:
    fused = randn(9, 48, 128, device=device).to(half)
    q, k, v = fused.clone().split_with_sizes((32, 8, 8), 1)
    angles, slots = randn(9, 64, device=device, seed=1), torch.tensor([3, 70, 1, 64, 65, 40, 0, 2, 9], device=device)
    layer = exact.pool(1, 2, 64, 8, 128, half, device)[0]
    exact.rope_write(q, k, v, layer, slots, angles.cos(), angles.sin())
    x1, x2 = fused[:, :40].float().chunk(2, 2)
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    turned = torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), 2)
    torch.testing.assert_close(q.float(), turned[:, :32], rtol=0.01, atol=0.01)
    keys, values = layer.k.flatten(0, 1), layer.v.flatten(0, 1)
    torch.testing.assert_close(keys[slots].float(), turned[:, 32:], rtol=0.01, atol=0.01)
    assert torch.equal(values[slots], fused[:, 40:])
    before = keys.clone(), values.clone()
    sources, targets = slots, slots.roll(1)
    exact.move(layer, sources, targets)
    for now, old in zip((keys, values), before, strict=True):
        assert torch.equal(now[targets], old[sources])
        others = torch.ones(len(old), dtype=torch.bool, device=device).index_fill_(0, slots, False)
        assert torch.equal(now[others], old[others])


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("vocabulary", [320, 128256])
def test_the_devices_filters_are_the_cpus(exact: Kernels, vocabulary: int, wide: bool, device: torch.device) -> None:
    kinds: list[dict[str, Any]] = [{"top_k": 50, "top_p": 0.95}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 3}, {}]
    params = [LogitParams(temperature=heat, **kind) for kind in kinds for heat in (0.7, 1.0, 3.0)]
    logits = (randn(len(params), vocabulary, device=device) * 8).round() / 4  # many are equal
    limits = [(one.top_k, one.top_p, np.log(one.min_p) if one.min_p else -np.inf, 0.0) for one in params]
    numbers = torch.arange(len(params), device=device)
    heats = torch.tensor([one.temperature for one in params], dtype=torch.float64, device=device)
    columns = torch.tensor(limits, dtype=torch.float64, device=device)
    draws = Draws(heats, numbers, numbers % 3, numbers * 1000, columns, most=50)
    expected = [
        choose_token(row, one, TokenHistory(one), None, Noise(i, i % 3, i * 1000))
        for i, (row, one) in enumerate(zip(logits.cpu().numpy(), params, strict=True))
    ]
    known = logits.double() if wide else logits
    assert choose_sampler(device)(known, draws).tolist() == expected
    columns[:, 3] = 1.0
    assert choose_sampler(device)(known, draws).tolist() == torch_sampling.law_tokens(known, draws).tolist()


def test_the_devices_logprobs_are_the_cpus(device: torch.device) -> None:
    logits = (randn(9, 128256, device=device) * 8).round() / 4
    tokens = torch.arange(9, device=device) * 1000
    found = logprobs(logits, tokens, 20)
    assert torch.equal(found[3:4], logprobs(logits[3:4], tokens[3:4], 20))
    for told, row, token in zip(found.tolist(), logits.cpu().numpy(), tokens.tolist(), strict=True):
        chosen, likeliest = row_logprobs(row, token, 20)
        assert told[1:21] == [one for one, _ in likeliest]
        np.testing.assert_allclose([told[0], *told[21:]], [chosen, *(value for _, value in likeliest)], atol=1e-9)


@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "every third"])
@pytest.mark.parametrize("vocabulary", [320, 49152, 128256])
def test_the_devices_tokens_are_the_cpus(exact: Kernels, vocabulary: int, reduced: bool, device: torch.device) -> None:
    temperatures = [0.0, 1.0, 0.7, 1.3, 3.0, 0.05] * 4
    logits = randn(len(temperatures), vocabulary, device=device) * 3
    seeds = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, len(temperatures))
    numbers = torch.arange(len(temperatures), device=device)
    draws = Draws(
        torch.tensor(temperatures, dtype=torch.float64, device=device),
        torch.from_numpy(seeds).to(device),
        numbers % 3,
        numbers * 1000,
    )
    ids = torch.arange(0, vocabulary, 3, device=device) if reduced else None
    known, expected = logits, []
    if ids is not None:
        known, logits = logits[:, ids], torch.full_like(logits, -torch.inf)
        logits[:, ids] = known
    for i, (row, temperature, seed) in enumerate(zip(logits.cpu().numpy(), temperatures, seeds.tolist(), strict=True)):
        params = LogitParams(temperature=temperature)
        noise = Noise(seed, i % 3, i * 1000)
        expected.append(choose_token(row, params, TokenHistory(params), None, noise))
    margins, theirs = torch.empty((2, len(temperatures)), dtype=torch.float64, device=device)
    assert choose_sampler(device)(known, draws, ids, margins).tolist() == expected
    torch_sampling.law_tokens(known, draws, ids, theirs)
    torch.testing.assert_close(margins, theirs, rtol=0.0, atol=1e-9)

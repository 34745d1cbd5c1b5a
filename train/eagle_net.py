"""An EAGLE3 head that can be trained, in torch: what model/eagle.py computes, for whole sequences and unrolled.

Its parameters have their published names, so `state_dict` is what is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verdraft.model.eagle import NUM_AUX, EagleConfig
from verdraft.model.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class Context:
    """Rows of some sequences, one after the other, with what the target's features left at each."""

    lengths: tuple[int, ...]
    places: Tensor  # [N] in their sequence
    keys: Tensor  # [N, kv_heads, dim]
    values: Tensor


@dataclass(frozen=True, slots=True)
class Chains:
    """What was drafted behind some rows, the anchors: the last ones with a feature of the target's."""

    anchors: Tensor  # [A] ascending
    hidden: Tensor  # [A, hidden]: what the latest step returned
    keys: tuple[Tensor, ...] = ()  # of every step but the first [A, kv_heads, dim]
    values: tuple[Tensor, ...] = ()

    def __getitem__(self, kept: Tensor) -> "Chains":  # bool [A]
        keys, values = (tuple(part[kept] for part in parts) for parts in (self.keys, self.values))
        return Chains(self.anchors[kept], self.hidden[kept], keys, values)


class EagleNet(nn.Module):
    """`embedding` [vocab, hidden] and `projection` [R, hidden] are the target's and stay as they are.

    It has the norms of EAGLE 3.1: fc_norm, norm_output.
    """

    embedding: Tensor
    projection: Tensor

    def __init__(self, config: EagleConfig, embedding: Tensor, projection: Tensor) -> None:
        super().__init__()
        assert config.fc_norm, "only this variant is trained"
        assert config.norm_output, "only this variant is trained"
        width = config.target_hidden_size
        self.config = config
        self.fc_norm = nn.ModuleList([nn.RMSNorm(width, config.norm_eps) for _ in range(NUM_AUX)])
        self.fc = nn.Linear(NUM_AUX * width, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("projection", projection, persistent=False)

    def normed(self, aux: Tensor) -> Tensor:  # [N, 3 * target_hidden]
        """What fc reads."""
        parts = aux.float().chunk(NUM_AUX, -1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)

    def start(self, aux: Tensor, tokens: Tensor, lengths: Sequence[int], anchors: Tensor) -> tuple[Context, Chains]:
        """The first step: aux [N, 3 * target_hidden] and the tokens [N] behind them, of sequences of these lengths."""
        features = self.fc(self.normed(aux)).float()
        inputs = self.midlayer.inputs(self.embedding[tokens], features)
        context = self.context(inputs, lengths)
        chains = Chains(anchors, features[anchors])
        return context, self._advance(context, chains, inputs[anchors], context.places[anchors])

    def context(self, inputs: Tensor, lengths: Sequence[int]) -> Context:  # [N, 2 * hidden]
        """What queries see of rows with these inputs."""
        places = torch.cat([torch.arange(length, device=inputs.device) for length in lengths])
        return Context(tuple(lengths), places, *self.midlayer.self_attn.keys_and_values(inputs, places))

    def step(self, context: Context, chains: Chains, tokens: Tensor) -> Chains:
        """One more: `tokens` [A] are those that the chains were to guess."""
        places = context.places[chains.anchors] + len(chains.keys) + 1
        inputs = self.midlayer.inputs(self.embedding[tokens], chains.hidden)
        keys, values = self.midlayer.self_attn.keys_and_values(inputs, places)
        longer = Chains(chains.anchors, chains.hidden, (*chains.keys, keys), (*chains.values, values))
        return self._advance(context, longer, inputs, places)

    def logits(self, chains: Chains) -> Tensor:  # [A, R]
        """Guesses at the next token of each."""
        return F.linear(chains.hidden, self.projection)

    def _advance(self, context: Context, chains: Chains, inputs: Tensor, places: Tensor) -> Chains:
        attention = self.midlayer.self_attn
        hidden = chains.hidden + attention.o_proj(attention(inputs, places, context, chains))
        hidden = self.norm(hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden)))
        return Chains(chains.anchors, hidden, chains.keys, chains.values)


class Layer(nn.Module):
    """The decoder layer's parts; its attention reads [embedding | feature]."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.mlp = Mlp(hidden, config.intermediate_size)

    def inputs(self, embedded: Tensor, features: Tensor) -> Tensor:  # both [n, hidden] -> [n, 2 * hidden]
        """What its attention reads."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), -1)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [n, hidden] -> [n, hidden]
        return F.linear(self.gated(x), self.down_proj.weight)

    def gated(self, x: Tensor) -> Tensor:  # [n, hidden] -> [n, inner]
        """What its second half reads."""
        gate, up = (F.linear(x, linear.weight) for linear in (self.gate_proj, self.up_proj))
        return F.silu(gate) * up


class Attention(nn.Module):
    """A query sees the rows up to its anchor and, behind, what its own chain drafted (PAPERS 4.5)."""

    frequencies: Tensor  # [dim / 2]

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.kv_heads, self.dim = config.num_kv_heads, dim
        self.q_proj = nn.Linear(2 * hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)
        self.register_buffer("frequencies", inverse_frequencies(dim, config.rope_theta, None), persistent=False)

    def keys_and_values(self, inputs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:  # each [n, kv_heads, dim]
        """Of rows with these inputs [n, 2 * hidden] at these places in their sequences."""
        keys, values = (linear(inputs).view(len(inputs), -1, self.dim) for linear in (self.k_proj, self.v_proj))
        return self._rotated(keys, places), values

    def forward(self, inputs: Tensor, places: Tensor, context: Context, chains: Chains) -> Tensor:
        """One query for each chain, from inputs [A, 2 * hidden]; [A, heads * dim], which o_proj reads."""
        queries = self._rotated(self.q_proj(inputs).view(len(inputs), -1, self.dim), places)
        queries = queries.view(len(inputs), self.kv_heads, -1, self.dim)
        attended, begin = [], 0
        for length in context.lengths:
            rows = torch.arange(begin, begin + length, device=inputs.device)
            first, last = torch.searchsorted(chains.anchors, rows[[0, -1]] + torch.tensor([0, 1]).to(rows)).tolist()
            own = [(k[first:last], v[first:last]) for k, v in zip(chains.keys, chains.values, strict=True)]
            seen = rows <= chains.anchors[first:last, None]
            attended.append(_attend(queries[first:last], context.keys[rows], context.values[rows], seen, own))
            begin += length
        return torch.cat(attended).flatten(1)

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:  # [n, heads, dim]
        angles = places[:, None, None] * self.frequencies
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """q [a, kv_heads, group, dim] over k and v [n, kv_heads, dim] as far as `seen` [a, n], and over the `own` key and
    value [a, kv_heads, dim] of each later step; returns like q."""
    q = q * q.shape[-1] ** -0.5
    scores = torch.einsum("akgd,nkd->kgan", q, k).masked_fill(~seen, -torch.inf)
    behind = [torch.einsum("akgd,akd->kga", q, key).unsqueeze(-1) for key, _ in own]
    shares = torch.cat([scores.float(), *behind], -1).softmax(-1)
    mixed = torch.einsum("kgan,nkd->akgd", shares[..., : len(k)], v)
    for share, (_, value) in zip(shares[..., len(k) :].unbind(-1), own, strict=True):
        mixed = mixed + torch.einsum("kga,akd->akgd", share, value)
    return mixed

"""Models that every folder's tests may use: tiny random ones, and the demo model."""

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import settings
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from verdraft.kernels.cpu import CpuKernels
from verdraft.kernels.torch_sampling import law_tokens
from verdraft.model.demo import demo_model
from verdraft.model.eagle import EagleConfig, EagleHead, assemble_eagle, tensor_shapes
from verdraft.model.transformer import Transformer
from verdraft.scheduler.device import Computed, Found, pack
from verdraft.spec.draft import ASK, EMPTY, Draft
from verdraft.spec.grammar import GrammarConstraint
from verdraft.spec.patience import Patience

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports it: tests outside gpu/ run on the CPU

settings.register_profile("long", max_examples=5000, deadline=None)  # `make properties`

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY_ROPE: dict[str, Any] = {**TINY, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on two threads, above all beside other work; tests/kernels covers threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class UnroundedKernels(CpuKernels):
    """What drafters compute here is what they were trained to compute."""

    def pack_rounded(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        return self.pack(weight, bias)


@pytest.fixture(scope="session")
def unrounded_kernels() -> CpuKernels:
    """The CPU's, which take drafters' weights as they are."""
    return UnroundedKernels()


TinyModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """tiny_model("Llama", **config): a folder with a random model of transformers' own class, tiny unless told."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    def build(family: str, max_shard_size: str = "1GB", **options: Any) -> Path:
        config_class = getattr(transformers, f"{family}Config")
        config = config_class(**{**(TINY if family == "OPT" else TINY_ROPE), **options})
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():  # zero biases and unit norms would hide mistakes
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and "bias" not in name else 0.0, std=0.2)
            else:
                torch.nn.init.normal_(parameter, std=0.1)
        folder = tmp_path_factory.mktemp(family.lower())
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return build


@pytest.fixture(scope="session")
def tiny_llama_path(tiny_model: TinyModel) -> Path:
    """2 layers, vocabulary 320, hidden 64, 4 heads over 2 KV heads of 32, context 512, EOS 2."""
    return tiny_model("Llama")


@pytest.fixture(scope="session")
def deep_llama_path(tiny_model: TinyModel) -> Path:
    """As tiny_llama_path, with 4 layers; an early exit there is no better than chance."""
    return tiny_model("Llama", num_hidden_layers=4)


@pytest.fixture(scope="session")
def deep_agreeing_path(tiny_model: TinyModel) -> Path:
    """As deep_llama_path, but the layers behind the first add little, so that early exits are often right."""
    folder = tiny_model("Llama", num_hidden_layers=4)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and ".layers.0." not in name:
            weight *= 0.1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_path(tiny_model: TinyModel) -> Path:
    """As tiny_llama_path, with the per-head norms of Qwen3."""
    return tiny_model("Qwen3")


@pytest.fixture(scope="session")
def tiny_eagle() -> EagleConfig:
    """An EAGLE3 head as wide as the tiny models; it reads what enters their two layers and what leaves them."""
    return EagleConfig(
        hidden_size=64,
        target_hidden_size=64,
        aux_layers=(0, 1, 2),
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        norm_eps=1e-5,
    )


@pytest.fixture(scope="session")
def eagle_tensors() -> Callable[[EagleConfig, int], dict[str, Tensor]]:
    """eagle_tensors(config, R): random weights of an EAGLE3 head that can draft R tokens."""

    def build(config: EagleConfig, num_ids: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1)
        return {
            name: torch.randn(shape, generator=draw) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.2)
            + ("norm" in name)
            for name, shape in tensor_shapes(config, num_ids).items()
        }

    return build


@pytest.fixture(scope="session")
def bigram_path(tiny_model: TinyModel) -> Path:
    """4 layers of which attention and all MLPs but the first add little: what follows depends on the last token."""
    folder = tiny_model("Llama", num_hidden_layers=4)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("o_proj.weight") or (name.endswith("down_proj.weight") and ".layers.0." not in name):
            weight *= 0.05
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def first_layer_eagle() -> Callable[[Path, Transformer], EagleHead]:
    """first_layer_eagle(path, model): a head that does what the model's first layer and head do, but for attention to
    earlier tokens: biases make every row attend to itself, and the features of the target count for nothing."""

    def build(path: Path, model: Transformer) -> EagleHead:
        config = EagleConfig(
            hidden_size=64,
            target_hidden_size=64,
            aux_layers=(0, 2, 4),
            intermediate_size=96,
            num_heads=2,
            num_kv_heads=2,
            head_dim=32,
            norm_eps=1e-6,
            qkv_bias=True,
        )
        weights = load_file(path / "model.safetensors")
        tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(config, 320).items()}
        for part in "qk":
            tensors[f"midlayer.self_attn.{part}_proj.bias"] += 8.0
        tensors["midlayer.self_attn.v_proj.weight"][:, :64] = torch.eye(64)
        tensors["midlayer.self_attn.o_proj.weight"] += torch.eye(64)
        tensors["midlayer.input_layernorm.weight"] += weights["model.embed_tokens.weight"].pow(2).mean().sqrt()
        for part in ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            tensors[f"midlayer.{part}.weight"] = weights[f"model.layers.0.{part}.weight"]
        tensors |= {"norm.weight": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"]}
        return assemble_eagle(config, tensors, np.arange(320), model)

    return build


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's folder; fetched when the user's cache lacks it. Mark the test `demo`."""
    return demo_model(progress=False)


class ScriptedDrafter:
    """Knows the continuation and lies about some of it: `wrong` is the chance of each drafted token to be wrong."""

    def __init__(self, answer: Sequence[int], wrong: float, seed: float, vocab: int = 48) -> None:
        self.answer, self.wrong, self.random, self.vocab = list(answer), wrong, random.Random(seed), vocab
        self.done = 0
        self.started = False

    def start(self, prompt: Sequence[int]) -> None:
        assert not self.started
        self.started = True

    def extend(self, tokens: Sequence[int]) -> None:
        assert list(tokens) == self.answer[self.done : self.done + len(tokens)]
        self.done += len(tokens)

    def clue(self) -> int:
        return ASK

    def propose(self, limit: int) -> Draft:
        ahead = self.answer[self.done : self.done + self.random.randint(0, limit)]
        lies = (self.random.randrange(self.vocab) if self.random.random() < self.wrong else t for t in ahead)
        return Draft(tuple(lies), probs=(1.0,) * len(ahead)) if ahead else EMPTY

    def stop(self) -> None:
        self.started = False


class ScriptedTrees(ScriptedDrafter):
    """Trees of any shape around the continuation, now and then with two equal children; `wrong` as above."""

    def propose(self, limit: int) -> Draft:
        rnd, tokens, parents, right = self.random, [], [], {-1: 0}  # right nodes, and how many tokens they stand for
        for node in range(rnd.randint(0, limit)):
            parents.append(max(-1, node - 1 - rnd.choice([0, 0, 1, 2, 5])))
            rest = self.answer[self.done + right[parents[-1]] :] if parents[-1] in right else []
            tokens.append(rest[0] if rest and rnd.random() >= self.wrong else rnd.randrange(self.vocab))
            if rest and tokens[-1] == rest[0]:
                right[node] = right[parents[-1]] + 1
        return Draft(tuple(tokens), "eagle", probs=(1.0,) * len(tokens), parents=tuple(parents))


@pytest.fixture
def scripted() -> type[ScriptedDrafter]:
    return ScriptedDrafter


@pytest.fixture
def scripted_trees() -> type[ScriptedTrees]:
    return ScriptedTrees


class LateDevice:
    """The CPU as a GPU would have it: what it gets comes as a copy, in one piece; what it shall do, it does only when
    somebody waits for it; and where it can, it answers with tokens."""

    overlaps = True

    def __init__(self) -> None:
        self.sampler = law_tokens
        self.pending = 0  # passes that are under way
        self.begun = self.ahead = 0  # passes, and those of them that began before the one before them had ended
        self.drawn = self.asked = 0  # tokens that were found here, and rows of logits that the host had to read

    def put(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        assert self.pending <= 1, "two passes are under way already"
        staged, parts = pack(arrays, pinned=False)
        tensors = parts.of(staged.clone())
        staged.fill_(0xA5)  # the next pass's by now
        return tensors

    def start(self, work: Callable[[], Computed]) -> Callable[[], Found]:
        assert self.pending <= 1, "two passes are under way already"
        self.begun, self.ahead = self.begun + 1, self.ahead + self.pending
        self.pending += 1

        def read() -> Found:
            self.pending -= 1
            computed = work()
            self.drawn, self.asked = self.drawn + len(computed.tokens), self.asked + len(computed.logits)
            return computed.found([tensor.numpy() for tensor in computed.readable])

        return read

    def fetch(self, tensors: Sequence[Tensor]) -> list[np.ndarray]:
        assert not self.pending, "nothing is computed between a pass and its end"
        return [tensor.clone().numpy() for tensor in tensors]


@pytest.fixture
def late_device() -> type[LateDevice]:
    return LateDevice


class FicklePatience(Patience):
    """Drafts now and then, whatever that brings."""

    def __init__(self, rnd: random.Random | None = None) -> None:
        super().__init__()
        self.random = rnd or random.Random(1)

    def waits(self, load: int) -> bool:
        return self.random.random() < 0.4


@pytest.fixture(scope="session")
def fickle_patience() -> type[FicklePatience]:
    return FicklePatience


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE: merges "th", "the", " t"; specials <|start|> and <|end|>; <think>, </think> and "    " added."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for text in ("th", "the", "\u0120t"):
        vocab[text] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e"), ("\u0120", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "    ")])
    folder = tmp_path_factory.mktemp("byte_level")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class JsonVocabulary:
    """Token 0 is the end; tokens 1 to 41 are pieces of JSON that can be cut in several ways; the rest have no text."""

    pieces = (*'{}[]",: .-0123456789abcdefnrstul', '{"', '":', '"}', '", "', "ab", "abc", "12", '"a', "true")

    def __init__(self, size: int) -> None:
        texts = ["<end>", *self.pieces]
        self.size = size
        self.eos_token_id = 0
        self.bos_token_id = None
        self.special_token_ids = [0]
        self.tokens = [text.encode() for text in texts] + [b""] * (size + 1 - len(texts))
        self.engine = LLTokenizer(TokenizerWrapper(self), n_vocab=size + 1, eos_token=[0])

    def __call__(self, text: str) -> list[int]:
        """Ids of a text, longest piece first; what is no JSON is left out."""
        if isinstance(text, bytes):
            raise TypeError
        ids = []
        while text:
            piece = max((piece for piece in self.pieces if text.startswith(piece)), key=len, default=text[0])
            ids += [self.pieces.index(piece) + 1] if piece in self.pieces else []
            text = text[len(piece) :]
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(self.tokens[token] for token in tokens if token).decode()

    def constraint(self, schema: dict[str, Any], **limits: int) -> GrammarConstraint:
        """A fresh one, with at most two spaces between JSON's parts. `limits` are LLParserLimits'."""
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": "[ ]{1,2}"})

        def compiled() -> LLMatcher:
            matcher = LLMatcher(self.engine, grammar, log_level=0, limits=LLParserLimits(**limits))
            assert not matcher.get_error()
            return matcher

        return GrammarConstraint(compiled(), self.size, compiled)


@pytest.fixture(scope="session")
def json_vocabulary() -> JsonVocabulary:
    """48 tokens."""
    return JsonVocabulary(48)


@pytest.fixture(scope="session")
def wide_json_vocabulary() -> JsonVocabulary:
    """320 tokens, as the tiny models have."""
    return JsonVocabulary(320)

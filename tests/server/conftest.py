"""Small tokenizers of both kinds, a tiny model with one of them, and the limits that parsers need."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from verdraft.server.requests import Limits
from verdraft.server.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentencepiece style: byte fallback, U+2581 before the first word, BOS <s> first; the model has 300 ids."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tmp_path_factory.mktemp("sentencepiece")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"vocab_size": 300}')
    return folder


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_folder: Path) -> TextTokenizer:
    return TextTokenizer(sentencepiece_folder)


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> TextTokenizer:
    return TextTokenizer(byte_level_folder)


@pytest.fixture(scope="session")
def model_path(tiny_model: Callable[..., Path], byte_level_folder: Path) -> Path:
    """A random model of four layers with the byte-level tokenizer, as a folder."""
    folder = tiny_model("Llama", num_hidden_layers=4)
    shutil.copy(byte_level_folder / "tokenizer.json", folder)
    return folder


@pytest.fixture
def limits() -> Limits:
    return Limits(model="demo/model", vocab_size=1000, max_model_len=100)

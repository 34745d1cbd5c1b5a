"""A small tokenizer of sentencepiece's kind, as a folder; and the limits that parsers need."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from verdraft.server.requests import Limits


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


@pytest.fixture
def limits() -> Limits:
    return Limits(model="demo/model", vocab_size=1000, max_model_len=100)

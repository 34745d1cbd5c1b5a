"""Between text and token ids, exactly: the bytes of every token, and special-token text only where it is wanted.

Built on a folder's tokenizer.json; no network, no remote code. Knows no request and no template. Every method may run
in a worker thread: encoding releases the GIL, and nothing changes after construction.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from verdraft.model.errors import ModelError
from verdraft.server.token_bytes import bytes_of_tokens


class TextTokenizer:
    """`vocab_size` is the model's (its config.json), which may be larger than the number of tokens with a text.

    A *special* token is one that tokenizer.json marks so; it has no bytes and is invisible in text. A *control* text is
    the text of any added token that is not only whitespace: in text that a user wrote it never becomes that token.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelError when the folder holds no readable tokenizer.json."""
        declared = _declared_size(folder)
        spec = _known(_read_json(folder / "tokenizer.json", required=True), declared)
        self.config = _read_json(folder / "tokenizer_config.json")
        added = {entry["id"]: entry for entry in spec.get("added_tokens", [])}
        controls = [entry for entry in added.values() if entry["content"].strip()]
        self._special_texts = {id: entry["content"] for id, entry in added.items() if entry["special"]}
        self._control_ids = {entry["content"]: entry["id"] for entry in controls}
        self._strips = {entry["content"]: (entry["lstrip"], entry["rstrip"]) for entry in controls}
        self._control = _alternatives(self._control_ids)
        self._markup = _alternatives(e["content"] for e in controls if not e["special"] and "|" not in e["content"])
        self._parsing = _load(spec, literal=False)
        self._literal = _load(_without_controls(spec), literal=True)
        self._literal_inner = _load(_without_controls(_without_first_prefix(spec)), literal=True)
        self.vocab_size = declared or self._parsing.get_vocab_size(with_added_tokens=True)
        self._bytes = bytes_of_tokens(self._parsing, spec, self.vocab_size, frozenset(self._special_texts))
        self._bos = self._find_bos()
        self._longest = _longest_token(spec, self._bytes)

    @property
    def control_texts(self) -> frozenset[str]:
        """The texts that would become an added token where special-token text is parsed."""
        return frozenset(self._control_ids)

    def count_controls(self, text: str) -> int:
        """How many tokens special-token parsing would cut out of `text`."""
        return sum(1 for _ in self._control.finditer(text)) if self._control_ids else 0

    def change_outside_markup(self, text: str, change: Callable[[str], str]) -> str:
        """`text` with everything changed but markup: control texts such as <think> that mark no turn."""
        pieces: list[str] = []
        end = 0
        for match in self._markup.finditer(text):
            pieces += [change(text[end : match.start()]), match[0]]
            end = match.end()
        return "".join([*pieces, change(text[end:])])

    def least_tokens(self, text: str) -> int:
        """A number of ids that `text` has at the least, found at once; 0 where the vocabulary does not tell."""
        known = self._longest and unicodedata.is_normalized("NFC", text)
        return len(text) // self._longest if known else 0

    def encode(self, text: str, allow_special: bool) -> list[int]:
        """Ids of `text` alone, without BOS; with `allow_special` special-token text becomes special tokens."""
        return _ids(self._parsing, text) if allow_special else self._encode_literal(self._literal, text)

    def encode_inner(self, text: str) -> list[int]:
        """Ids of ordinary text that does not stand at the beginning."""
        return self._encode_literal(self._literal_inner, text)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a string prompt: special-token text is parsed, BOS comes first if the model's tokenizer adds it.

        A prompt that already starts with BOS gets no second one; an empty one stays empty.
        """
        ids = self.encode(text, allow_special=True)
        return ids if not ids or ids[: len(self._bos)] == self._bos else self._bos + ids

    def encode_guarded(self, text: str, restore: Mapping[int, str]) -> list[int]:
        """Ids of text in which some characters are disguised so that they form no special-token text.

        Special tokens are found in `text` as it is; what lies between them is put through str.translate(restore) and
        is ordinary text then. Without disguised special-token text the ids equal encode(restored, allow_special=True).
        """
        ids: list[int] = []
        end, strip_next = 0, False
        for match in self._control.finditer(text):
            strip_before, strip_after = self._strips[match[0]]
            ids += self._segment(text, end, match.start(), restore, strip_next, strip_before)
            ids.append(self._control_ids[match[0]])
            end, strip_next = match.end(), strip_after
        return ids + self._segment(text, end, len(text), restore, strip_next, False)

    def decode(self, ids: Iterable[int], show_special: bool) -> str:
        """Lossy UTF-8 over the tokens' bytes; special tokens are written out with `show_special`, else left out."""
        return b"".join(self._visible_bytes(token, show_special) for token in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes | None:
        """A token's exact bytes, possibly a part of a character; None for special tokens and ids without a text."""
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        """A token alone, for people: lossy UTF-8, special tokens written out."""
        return self.decode([token], show_special=True)

    def is_special(self, token: int) -> bool:
        return token in self._special_texts

    def _visible_bytes(self, token: int, show_special: bool) -> bytes:
        known = self._bytes[token]
        if known is not None:
            return known
        return self._special_texts.get(token, "").encode() if show_special else b""

    def _segment(
        self, text: str, start: int, end: int, restore: Mapping[int, str], strip_left: bool, strip_right: bool
    ) -> list[int]:
        segment = text[start:end].translate(restore)
        segment = segment.lstrip() if strip_left else segment
        segment = segment.rstrip() if strip_right else segment
        if not segment:
            return []
        return self._encode_literal(self._literal if start == 0 else self._literal_inner, segment)

    def _encode_literal(self, tokenizer: Tokenizer, text: str) -> list[int]:
        ids = _ids(tokenizer, text)
        if not self._control_ids or set(self._control_ids.values()).isdisjoint(ids):
            return ids
        # Rare vocabularies (unigram) hold control texts as ordinary pieces too: cut each behind its first character.
        cuts = [0, *(match.start() + 1 for match in self._control.finditer(text)), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        return [token for piece in pieces for token in _ids(tokenizer, piece)]

    def _find_bos(self) -> list[int]:
        """What the tokenizer puts before a text; tokenizer_config.json's add_bos_token has the last word."""
        wanted = self.config.get("add_bos_token")
        if wanted is False:
            return []
        if wanted is True:
            token = self._control_ids.get(special_token(self.config, "bos_token"))
            return [] if token is None else [token]
        plain = self._parsing.encode("a", add_special_tokens=False).ids
        full = self._parsing.encode("a", add_special_tokens=True).ids
        return full[: full.index(plain[0])] if plain and plain[0] in full else []


def special_token(config: Mapping[str, Any], name: str) -> str:
    """The text of `bos_token`, `eos_token`, ... in a tokenizer_config.json; "" when there is none."""
    value = config.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file() and not required:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the tokenizer file {path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"the tokenizer file {path.name} holds no JSON object")
    return value


def _load(spec: Mapping[str, Any], literal: bool) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"tokenizer.json cannot be used: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = literal
    return tokenizer


def _without_controls(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer, for which control text is ordinary text."""
    added = [{**entry, "special": bool(entry["content"].strip())} for entry in spec.get("added_tokens", [])]
    return {**spec, "added_tokens": added}


def _without_first_prefix(value: Any) -> Any:
    """The same tokenizer for text that is not at the start: Metaspace adds its space only to the very first word."""
    if isinstance(value, list):
        return [_without_first_prefix(entry) for entry in value] if len(value) < 100 else value
    if not isinstance(value, dict):
        return value
    if value.get("type") == "Metaspace" and value.get("prepend_scheme") == "first":
        return {**value, "prepend_scheme": "never"}
    return {key: entry if key == "model" else _without_first_prefix(entry) for key, entry in value.items()}


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # NOTE: encode() holds the GIL for as long as it takes; the batch call releases it.
    found: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return found


def _longest_token(spec: Mapping[str, Any], token_bytes: Iterable[bytes | None]) -> int:
    """In bytes; 0 where normalised text may become shorter, or one token stand for any number of characters."""
    added = spec.get("added_tokens", [])
    lossless = _keeps_length(spec.get("normalizer")) and _has_every_byte(spec)
    if not lossless or any(entry["lstrip"] or entry["rstrip"] for entry in added):
        return 0
    special = [len(entry["content"].encode()) for entry in added]
    return max([len(known) for known in token_bytes if known] + special, default=0)


def _keeps_length(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether text in NFC cannot become shorter."""
    match normalizer:
        case None | {"type": "NFC" | "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new) >= len(old)
        case {"type": "Sequence", "normalizers": list(parts)}:
            return all(_keeps_length(part) for part in parts)
    return False


def _has_every_byte(spec: Mapping[str, Any]) -> bool:
    return bool(spec["model"].get("byte_fallback")) or "ByteLevel" in json.dumps(spec.get("pre_tokenizer"))


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Leftmost and longest, as the tokenizer itself searches."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _declared_size(folder: Path) -> int | None:
    """Of the model's vocabulary; None where there is no model."""
    config = _read_json(folder / "config.json")
    declared = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return declared if isinstance(declared, int) else None


def _known(spec: dict[str, Any], size: int | None) -> dict[str, Any]:
    """Without added tokens that the model has no embedding of, such as a [PAD] of training alone: what they stand for
    is text like any other."""
    if size is None:
        return spec
    return {**spec, "added_tokens": [entry for entry in spec.get("added_tokens", []) if entry["id"] < size]}

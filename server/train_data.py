"""Prompts to train on, as token ids, from a folder of conversations (*.jsonl) and texts (*.txt)."""

import json
import random
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from verdraft.server.errors import ApiError
from verdraft.server.parse_chat import parse_chat_prompt
from verdraft.server.service import Text
from verdraft.train.prompts import DataError, TrainingPrompt

PIECE_CHARS = 600  # of a text: about 150 tokens
PIECES = 200  # of one text


def read_prompts(folder: Path, text: Text, seed: int = 0) -> list[TrainingPrompt]:
    """Every conversation up to one of its user turns, and pieces of texts; one of each file in turn, in a seeded order.

    A conversation that ends with the user's turn is a prompt of an evaluation: every second of a file is held out. Of
    recorded conversations and texts it is every tenth. Raises DataError.
    """
    rng = random.Random(seed)
    files = sorted([*folder.rglob("*.jsonl"), *folder.rglob("*.txt")])
    if not files:
        raise DataError(f"--data must name a folder with *.jsonl or *.txt files, not {str(folder)!r}")
    groups = [list(_conversations(f, text, rng) if f.suffix == ".jsonl" else _pieces(f, text, rng)) for f in files]
    for group in groups:
        rng.shuffle(group)
    return [prompt for prompt in chain.from_iterable(zip_longest(*groups)) if prompt is not None]


def _conversations(file: Path, text: Text, rng: random.Random) -> Iterator[TrainingPrompt]:
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            ids = text.template.encode(parse_chat_prompt({"messages": _until_user(messages, rng)}))
        except (ApiError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"{file.name} line {number}: expected a conversation in `messages` ({error})") from error
        asked = messages[-1]["role"] == "user"
        yield TrainingPrompt(file.stem, tuple(ids), number % (2 if asked else 10) == 0, asked)


def _until_user(messages: list[dict[str, Any]], rng: random.Random) -> list[dict[str, str]]:
    """The whole prompt, or a recorded conversation up to one of its user's turns."""
    users = [number for number, message in enumerate(messages, 1) if message["role"] == "user"]
    end = users[-1] if users[-1] == len(messages) else rng.choice(users)
    return [{"role": m["role"], "content": m["content"]} for m in messages[:end]]


def _pieces(file: Path, text: Text, rng: random.Random) -> Iterator[TrainingPrompt]:
    whole = file.read_text(encoding="utf-8")
    starts = range(0, max(1, len(whole) - PIECE_CHARS), PIECE_CHARS)
    chosen = sorted(rng.sample(starts, min(PIECES, len(starts))))
    for number, start in enumerate(chosen):
        piece = whole[start : start + rng.randint(PIECE_CHARS // 4, PIECE_CHARS)]
        yield TrainingPrompt(file.stem, tuple(text.tokenizer.encode_prompt(piece)), number % 10 == 9, False)

"""Random but valid requests for the soak test: every sampling field, n, stops, predictions, both endpoints."""

import random
from collections.abc import Sequence
from typing import Any

from verdraft.bench.prompts import Prompt


def sampling(rng: random.Random, modes: Sequence[str]) -> dict[str, Any]:
    """Sampling fields that both endpoints share; `modes` are values of `speculation`."""
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, 96),
        "temperature": rng.choice([0, 0, 0.7, 1, 1.5]),
        "speculation": rng.choice(modes),
    }
    optional: dict[str, Any] = {
        "n": rng.randint(2, 4),
        "seed": rng.randint(-(2**31), 2**31),
        "top_p": rng.uniform(0.1, 1),
        "top_k": rng.randint(1, 50),
        "min_p": rng.uniform(0, 0.2),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.8, 1.3),
        "logit_bias": {str(rng.randrange(1000)): rng.uniform(-100, 5)},
        "stop": rng.choice(["\n\n", ["the", "The"], ".", ["}", "```"]]),
        "min_tokens": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        "priority": rng.randint(-2, 2),
        "cache_salt": rng.choice("abc"),
    }
    return body | {name: value for name, value in optional.items() if rng.random() < 0.2}


def chat_body(rng: random.Random, prompt: Prompt, modes: Sequence[str]) -> dict[str, Any]:
    """A chat request; one in four brings a prediction, right or wrong."""
    body = {"messages": list(prompt.messages), **sampling(rng, modes)}
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    if rng.random() < 0.25:
        content = prompt.reference or prompt.messages[-1]["content"]
        body["prediction"] = {"type": "content", "content": content}
    return body


def completion_body(rng: random.Random, prompt: Prompt, modes: Sequence[str]) -> dict[str, Any]:
    """A completion request of one or two prompts cut from a chat's text."""
    text = prompt.messages[-1]["content"][: rng.randint(1, 2000)] or "x"
    body = {"prompt": rng.choice([text, [text, "Once upon a time"]]), **sampling(rng, modes)}
    if rng.random() < 0.2:
        body["logprobs"] = rng.randint(0, 5)
    return body

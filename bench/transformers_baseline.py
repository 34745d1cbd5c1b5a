"""transformers' own greedy `generate` in fp32, measured like the server: a line of JSON in, a line of JSON out.

    python -m verdraft.bench.transformers_baseline [MODEL] < prompts.jsonl

A line has `messages` or `prompt_token_ids`, and `max_tokens`. `Baseline` runs this as a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from verdraft.bench.client import Answer, BadAnswer
from verdraft.bench.report import rate
from verdraft.model.source import resolve_model


class Clock(BaseStreamer):
    """Notes when each token arrives; the first `put` is the prompt."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.answer = Answer()

    def put(self, value: torch.Tensor) -> None:
        if self.answer.prompt_ids:
            self.answer.add_ids(value.tolist(), time.perf_counter() - self.start)
        else:
            self.answer.prompt_ids = value.flatten().tolist()

    def end(self) -> None:
        pass


class Baseline:
    """The process of this file, asked one prompt at a time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid

    def ask(self, prompt_ids: list[int], max_tokens: int) -> Answer:
        """Generate greedily after `prompt_ids`; blocks until the answer is complete."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"prompt_token_ids": prompt_ids, "max_tokens": max_tokens}) + "\n")
        stdin.flush()
        if not (line := stdout.readline()):
            raise BadAnswer("the transformers baseline has ended; its message is on stderr")
        row = json.loads(line)
        return Answer(prompt_ids, row["ids"], row["ttft_s"], row["decode_s"], row["num_decoded"])


@contextmanager
def running(model: str | None, threads: int) -> Iterator[Baseline]:
    """A loaded baseline."""
    command = [sys.executable, "-m", "verdraft.bench.transformers_baseline", f"--threads={threads}"]
    command += [model] if model else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Baseline(process)
        # leaving the block closes stdin, which ends the process


def generate(model: Any, prompt_ids: list[int], max_tokens: int) -> Answer:
    """One greedy answer of a transformers model."""
    clock = Clock()
    ids = torch.tensor([prompt_ids])
    options = {"max_new_tokens": max_tokens, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
    return clock.answer


def row_of(answer: Answer) -> dict[str, Any]:
    """The line that is printed."""
    return {
        "ids": answer.ids,
        "ttft_s": answer.ttft,
        "decode_s": answer.decode_time,
        "num_decoded": answer.num_decoded,
        "decode_tokens_per_s": rate(answer.num_decoded, answer.decode_time),
        "prefill_tokens_per_s": rate(len(answer.prompt_ids), answer.ttft),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="verdraft.bench.transformers_baseline", description=__doc__)
    parser.add_argument("model", nargs="?", help="folder, hub id or .gguf file (default: the demo model)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: one a core)")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: as each line says)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = resolve_model(args.model, progress=False)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    generate(model, [0, 1, 2, 3], 2)  # the first pass allocates
    for line in sys.stdin:
        row = json.loads(line)
        limit = min(row["max_tokens"], args.max_tokens or row["max_tokens"])
        answer = generate(model, row.get("prompt_token_ids") or prompt_ids(tokenizer, row["messages"]), limit)
        print(json.dumps(row_of(answer)), flush=True)


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The ids of a chat, up to where the assistant speaks."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


if __name__ == "__main__":
    main()

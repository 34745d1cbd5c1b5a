"""OpenVINO GenAI offline: JSON lines in and out. Run with the Python of its environment: knows nothing of verdraft.

A line has `prompts` (a list of chats), `max_tokens` and `ignore_eos`; the answer is a list with one object per prompt.
"""

import argparse
import json
import sys
import time
from typing import Any

import openvino_genai as genai  # type: ignore[import-not-found]  # lives in an environment of its own


class Clock(genai.StreamerBase):  # type: ignore[misc]  # untyped
    """Notes when the first and the last token arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.start = time.perf_counter()
        self.times: list[float] = []  # seconds, one for each call

    def write(self, _: object) -> Any:
        self.times.append(time.perf_counter() - self.start)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True, help="streams at a time")
    parser.add_argument("--draft", type=int, default=0, help="tokens of a draft by prompt lookup; 0: no drafts")
    args = parser.parse_args()
    pipeline = new_pipeline(args)
    for line in sys.stdin:
        print(json.dumps(answer(pipeline, json.loads(line), args.draft)), flush=True)


def new_pipeline(args: argparse.Namespace) -> Any:
    """A pipeline that batches, with float32 arithmetic, keys and values, and no cache of earlier prompts."""
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = args.slots
    scheduler.cache_size = 2  # GiB
    options: dict[str, Any] = {"prompt_lookup": True} if args.draft else {}
    return genai.LLMPipeline(
        args.model,
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_NUM_THREADS=args.threads,
        INFERENCE_PRECISION_HINT="f32",
        KV_CACHE_PRECISION="f32",
        DYNAMIC_QUANTIZATION_GROUP_SIZE="0",
        **options,
    )


def answer(pipeline: Any, request: dict[str, Any], draft: int) -> list[dict[str, Any]]:
    """One prompt is timed token by token; several are one batch, of which only the counts are known."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = request["max_tokens"], request["ignore_eos"]
    config.apply_chat_template = False
    if draft:
        config.num_assistant_tokens, config.max_ngram_size = draft, 3
    tokenizer = pipeline.get_tokenizer()
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in request["prompts"]]
    if len(texts) == 1:
        return [single(pipeline, tokenizer, texts[0], config)]
    inputs = tokenizer.encode(texts, add_special_tokens=False)
    lengths = inputs.attention_mask.data.sum(axis=1).tolist()
    result = pipeline.generate(inputs, config)
    return [{"prompt_tokens": n, "num_tokens": len(ids)} for n, ids in zip(lengths, result.tokens, strict=True)]


def single(pipeline: Any, tokenizer: Any, text: str, config: Any) -> dict[str, Any]:
    """The answer to one prompt, with its times."""
    clock = Clock()
    inputs = tokenizer.encode(text, add_special_tokens=False)
    result = pipeline.generate(inputs, config, clock)
    return {
        "prompt_tokens": inputs.input_ids.shape[1],
        "num_tokens": len(result.tokens[0]),
        "ttft": clock.times[0],
        "decode_time": clock.times[-1] - clock.times[0],
    }


if __name__ == "__main__":
    main()

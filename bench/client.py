"""One streamed chat request and what a client can measure of it. Knows HTTP and SSE, not how the server is built."""

import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT = "/v1/chat/completions"


class BadAnswer(Exception):
    """The server refused, failed or broke the stream; the message says how."""


@dataclass(slots=True)
class Answer:
    """Seconds are measured by the client, from sending the request on."""

    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    ttft: float = 0.0  # to the first token
    decode_time: float = 0.0  # from the first tokens to the last
    num_decoded: int = 0  # tokens that came after the first ones
    cached_tokens: int = 0  # prompt tokens that needed no prefill
    num_spec_steps: int = 0
    num_accepted: int = 0
    finish: str | None = None

    def add_ids(self, ids: list[int], elapsed: float) -> None:
        """Tokens of one chunk, `elapsed` seconds after the request was sent."""
        if not ids:
            return
        if self.ids:
            self.decode_time = elapsed - self.ttft
            self.num_decoded += len(ids)
        else:
            self.ttft = elapsed
        self.ids += ids

    def add_chunk(self, chunk: dict[str, Any], elapsed: float) -> None:
        """One event of the stream."""
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        for choice in chunk["choices"]:
            self.add_ids(choice.get("token_ids") or [], elapsed)
            self.finish = choice["finish_reason"] or self.finish
        if usage := chunk.get("usage"):
            self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        if report := chunk.get("speculation"):
            self.num_spec_steps = report["num_spec_steps"]
            self.num_accepted = report["num_accepted_draft_tokens"]


def new_client(url: str) -> httpx.AsyncClient:
    """A client without a limit on connections; the key comes from VERDRAFT_API_KEY."""
    key = os.environ.get("VERDRAFT_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=httpx.Timeout(600, connect=30), limits=limits)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of an SSE body up to [DONE]. Raises BadAnswer for an error, or an end without [DONE]."""
    if response.status_code != 200:
        body = (await response.aread()).decode(errors="replace")
        raise BadAnswer(f"{response.status_code}: {body[:500]}")
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise BadAnswer(f"error event: {event['error']}")
            yield event
    raise BadAnswer("the stream ended without [DONE]")


async def stream_chat(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Send a chat request, read it to its end. Raises BadAnswer and httpx errors."""
    extras = {"stream_options": {"include_usage": True}, "return_token_ids": True, "return_speculation": True}
    answer = Answer()
    start = time.perf_counter()
    async with client.stream("POST", CHAT, json={**body, "stream": True, **extras}) as response:
        async for chunk in events(response):
            answer.add_chunk(chunk, time.perf_counter() - start)
    if answer.finish is None:
        raise BadAnswer("the stream has no finish_reason")
    return answer

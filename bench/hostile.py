"""Clients that mean harm, or behave as if: bad bodies, half requests, slow readers, floods, injected faults.

Each act returns what happened in a word or two, or raises BadAnswer for an answer that the HTTP contract forbids.
"""

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from verdraft.bench.client import BadAnswer, events

Act = Callable[[], Awaitable[str]]

COMPLETION = "/v1/completions"
SLOW_BYTES, SLOW_PAUSE, SLOW_SECONDS = 512, 0.25, 8.0
ODD_SECONDS = 20.0  # for a request that may be valid and endless
FLOOD = 60  # requests at once
REFUSALS = frozenset({"rate_limit_exceeded", "draining", "loading"})
WRONG_BYTES = b"\x00\xff{[]\"'"  # no "}": cut behind it, a body may be a valid one
ODD: tuple[Any, ...] = (None, True, -1, 1e308, 2**70, "", "x", [], {}, [[1]], {"type": "text"}, "\x00")


def error_code(response: httpx.Response) -> str:
    """The code of an error answer, which must have the contract's four keys."""
    try:
        error = response.json()["error"]
        if set(error) == {"message", "type", "param", "code"}:
            return str(error["code"])
    except (ValueError, KeyError, TypeError):
        pass
    raise BadAnswer(f"{response.status_code} without the error object: {response.text[:200]!r}")


def endless(**fields: Any) -> dict[str, Any]:
    """A request that goes on until somebody ends it."""
    return {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0, **fields}


@dataclass(slots=True)
class Hostile:
    """One way to harm after another. `context` is the model's longest prompt and answer, in tokens."""

    client: httpx.AsyncClient
    rng: random.Random
    context: int

    def acts(self) -> tuple[Act, ...]:
        return (
            *(self.bad_field, self.bad_bytes, self.wrong_place, self.leave_head, self.leave_body, self.leave_early),
            *(self.leave_stream, self.slow_reader, self.huge_prompt, self.huge_body, self.long_prompt, self.flood),
            *(self.fail_step, self.fail_step, self.reset),
        )

    async def refused(self, status: int, request: Awaitable[httpx.Response]) -> str:
        """The request must be refused with `status`, or because the server is full or not there."""
        response = await request
        code = error_code(response) if response.status_code != 200 else "none"
        if response.status_code != status and code not in REFUSALS:
            raise BadAnswer(f"{response.status_code} {code} instead of {status}")
        return code

    async def bad_field(self) -> str:
        field = self.rng.choice(["prompt", "max_tokens", "temperature", "stop", "n", "logit_bias", "prediction"])
        body = endless(max_tokens=1) | {field: self.rng.choice(ODD)}
        try:
            response = await self.client.post(COMPLETION, json=body, timeout=ODD_SECONDS)
        except httpx.ReadTimeout:  # as many tokens as fit is a valid wish
            return "left an odd request"
        if response.status_code == 200:  # null is a default, and some odd values are fine
            return "odd field"
        if response.status_code >= 500 and error_code(response) not in REFUSALS:
            raise BadAnswer(f"{response.status_code} for {field}={body[field]!r}")
        return error_code(response)

    async def bad_bytes(self) -> str:
        raw = json.dumps(endless()).encode()
        at, cut = self.rng.randrange(len(raw) // 2), self.rng.randrange(len(raw) - 1)
        raw = broken(raw, at, self.rng.choice(WRONG_BYTES), cut)
        sent = self.client.post(COMPLETION, content=raw, headers={"content-type": "application/json"})
        return await self.refused(400, sent)

    async def wrong_place(self) -> str:
        return await self.refused(404, self.client.post(f"/v1/{self.rng.randrange(1000)}", json={}))

    async def leave_head(self) -> str:
        return await self._leave(lambda head, body: head[: self.rng.randrange(len(head))])

    async def leave_body(self) -> str:
        return await self._leave(lambda head, body: head + body[: self.rng.randrange(len(body))])

    async def leave_early(self) -> str:
        return await self._leave(lambda head, body: head + body)

    async def _leave(self, part: Callable[[bytes, bytes], bytes]) -> str:
        head, body = raw_request(endless(stream=self.rng.random() < 0.5))
        _, writer = await self._connect()
        writer.write(part(head, body))
        await asyncio.sleep(self.rng.choice([0, 0.01, 0.2]))
        writer.close()
        return "left before an answer"

    async def leave_stream(self) -> str:
        async with self.client.stream("POST", COMPLETION, json=endless(stream=True)) as response:
            if response.status_code != 200:
                await response.aread()
                return error_code(response)
            left = self.rng.randint(1, 30)
            async for _ in events(response):
                left -= 1
                if not left:
                    return "left a stream"
        return "stream"

    async def slow_reader(self) -> str:
        """Take a large answer in drops, then leave."""
        reader, writer = await self._connect(receive_buffer=4096)
        writer.write(b"".join(raw_request(endless(stream=True, logprobs=5, return_token_ids=True))))
        try:
            async with asyncio.timeout(SLOW_SECONDS + 30):
                for _ in range(int(SLOW_SECONDS / SLOW_PAUSE)):
                    if not await reader.read(SLOW_BYTES):
                        break
                    await asyncio.sleep(SLOW_PAUSE)
        except TimeoutError:  # a full server lets it wait that long
            return "left while it waited"
        finally:
            writer.close()
        return "read slowly"

    async def huge_prompt(self) -> str:
        return await self.refused(400, self.client.post(COMPLETION, json=endless(prompt=[5] * (self.context + 1))))

    async def huge_body(self) -> str:
        try:
            return await self.refused(413, self.client.post(COMPLETION, json=endless(prompt="x" * (5 << 20))))
        except httpx.WriteError:  # refused by the declared length: the connection is closed over what still comes
            return "request_too_large"

    async def long_prompt(self) -> str:
        prompt = [self.rng.randrange(100, 2000) for _ in range(min(2000, self.context - 2))]
        return await self._answered(endless(prompt=prompt, max_tokens=1))

    async def flood(self) -> str:
        found = await asyncio.gather(*(self._answered(endless(max_tokens=2)) for _ in range(FLOOD)))
        return "flood refused in part" if "rate_limit_exceeded" in found else "flood"

    async def fail_step(self) -> str:
        """A fault of its own: this request fails or is preempted, and nobody else may notice."""
        kind = self.rng.choice(["raise", "nan", "preempt"])
        fault = {"kind": kind, "after_tokens": self.rng.randrange(8)}
        body = endless(max_tokens=12, speculation="off", fault=fault)  # a long accepted draft would step over it
        response = await self.client.post(COMPLETION, json=body)
        code = "none" if response.status_code == 200 else error_code(response)
        if code not in REFUSALS and code != ("none" if kind == "preempt" else "internal_error"):
            raise BadAnswer(f"{response.status_code} {code} for a fault of kind {kind}")
        return f"fault {kind}" if code not in REFUSALS else code

    async def reset(self) -> str:
        response = await self.client.post("/reset_prefix_cache")
        return "reset" if response.status_code == 200 else error_code(response)

    async def _answered(self, body: dict[str, Any]) -> str:
        response = await self.client.post(COMPLETION, json=body)
        if response.status_code == 200:
            return "plain"
        if error_code(response) not in REFUSALS:
            raise BadAnswer(f"{response.status_code}: {response.text[:200]}")
        return error_code(response)

    async def _connect(self, receive_buffer: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = urlsplit(str(self.client.base_url))
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (where.hostname, where.port))
        return await asyncio.open_connection(sock=sock, limit=4096)


def broken(raw: bytes, at: int, byte: int, cut: int) -> bytes:
    """A JSON object with one byte changed and its end cut off."""
    return (raw[:at] + bytes([byte]) + raw[at + 1 :])[:cut]


def raw_request(body: dict[str, Any]) -> tuple[bytes, bytes]:
    """Head and body of a completion request as they go over the wire."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode(), raw

"""A small server of our stream format: it answers a chat with the character codes of its last message."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


def chunk(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": None, **choice}]}


def answer_events(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Two ids a chunk; mode `broken` changes the second id, `failing` ends in an error event.

    The answer by a schema is its type.
    """
    form = body.get("response_format")
    text = form["json_schema"]["schema"]["type"] if form else body["messages"][-1]["content"]
    ids = [ord(c) for c in text][: body["max_tokens"]]
    if body.get("speculation") == "broken" and body["cache_salt"].endswith("-1"):
        ids[1:2] = [0]
    found = [{**chunk(), "prompt_token_ids": [1, 2, 3, 4]}]
    found += [chunk(token_ids=ids[i : i + 2]) for i in range(0, len(ids), 2)]
    if body.get("speculation") == "failing":
        return [*found, {"error": {"message": "no", "type": "server_error", "param": None, "code": "internal_error"}}]
    usage = {"prompt_tokens_details": {"cached_tokens": 1}}
    report = {"num_spec_steps": 2, "num_accepted_draft_tokens": 3}
    return [*found, chunk(finish_reason="stop"), {"choices": [], "usage": usage, "speculation": report}]


async def chat(request: Request) -> Response:
    body = await request.json()
    if body.get("speculation") == "unknown":
        return JSONResponse({"error": {"message": "speculation: no such mode"}}, 400)

    async def stream() -> AsyncIterator[str]:
        for event in answer_events(body):
            yield f"data: {json.dumps(event)}\n\n"
        if body.get("speculation") != "cut":
            yield "data: [DONE]\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


async def metrics(_: Request) -> Response:
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return Response("".join(f"# TYPE verdraft_{name} gauge\nverdraft_{name} 0\n" for name in gauges))


async def server_info(_: Request) -> Response:
    return JSONResponse({"speculation_modes": ["off", "suffix", "auto"]})


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    info = Route("/server_info", server_info)
    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/metrics", metrics), info])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://stub") as found:
        yield found

"""A client that resumes broken streams: it reconnects to any gateway with the id of its last event."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

RETRY_S = 0.1


@dataclass(slots=True)
class SoakRecord:
    """The outcome of one request."""

    body: dict[str, Any]
    began: float = field(default_factory=time.monotonic)
    request_id: str = ""
    last_event: str = ""
    text: dict[int, str] = field(default_factory=dict)
    # The log-probability of each token, if the request asks for them.
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage_tokens: int = 0
    outcome: str = ""  # complete, error or cancelled by the client
    error: dict[str, Any] | None = None
    breaks: int = 0
    resumes: int = 0
    refusals: int = 0
    tokens_at: list[float] = field(default_factory=list)

    @property
    def worst_pause_s(self) -> float:
        times = self.tokens_at
        return max((b - a for a, b in pairwise(times)), default=0.0)


async def ask(
    session: aiohttp.ClientSession,
    gateways: Sequence[str],
    key: str,
    body: dict[str, Any],
    give_up_s: float,
    record: SoakRecord | None = None,
) -> SoakRecord:
    """Send one request and read it to its end, over broken connections.

    key: idempotency key, which makes repeated requests one. record: filled while the answer arrives; new by default.
    """
    record = record or SoakRecord(body)
    turn = hash(key)
    while not record.outcome and time.monotonic() - record.began < give_up_s:
        url = gateways[turn % len(gateways)]
        turn += 1
        try:
            await _stream(session, url, key, record)
        except (TimeoutError, aiohttp.ClientError, OSError):
            record.breaks += 1
        if not record.outcome:
            await asyncio.sleep(RETRY_S)
    return record


async def _stream(session: aiohttp.ClientSession, url: str, key: str, record: SoakRecord) -> None:
    headers = {"Accept": "text/event-stream"}
    if record.request_id:
        record.resumes += 1
        headers["Last-Event-ID"] = record.last_event
        call = session.get(f"{url}/v1/completions/{record.request_id}/stream", headers=headers)
    else:
        headers["Idempotency-Key"] = key
        call = session.post(f"{url}/v1/completions", json=record.body, headers=headers)
    async with call as response:
        if response.status in (429, 503):
            record.refusals += 1
            return
        if response.status != 200:
            record.outcome, record.error = "error", {"status": response.status, "body": await response.text()}
            return
        async for line in response.content:
            if line.startswith(b"id: "):
                record.last_event = line[4:].decode().strip()
            elif line.startswith(b"data: "):
                _take(record, line[6:].decode().strip())


def _take(record: SoakRecord, data: str) -> None:
    if data == "[DONE]":
        record.outcome = "complete"
        return
    event = json.loads(data)
    if "error" in event and event["error"]["code"] == "shutting_down":  # another gateway has the rest
        record.breaks += 1
        return
    if "error" in event:
        record.outcome, record.error = "error", event["error"]
        return
    record.request_id = event["id"]
    for choice in event["choices"]:
        if choice["logprobs"] is not None:
            record.logprobs.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
        if choice["text"]:
            record.text[choice["index"]] = record.text.get(choice["index"], "") + choice["text"]
            record.tokens_at.append(time.monotonic())
    if event.get("usage"):
        record.usage_tokens = event["usage"]["completion_tokens"]

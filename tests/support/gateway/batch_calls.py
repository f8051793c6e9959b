"""Calls of files and batches for tests: uploads, batches, and their ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from tests.support.gateway.running import MODEL, RunningGateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat_line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """Return a line with a chat of one message."""
    call = {"model": MODEL, "messages": [{"role": "user", "content": f"number {number}"}], **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": call}


def completion_line(number: int, **body: Any) -> dict[str, Any]:
    """Return a line with a completion of one prompt."""
    call = {"model": MODEL, "prompt": f"number {number}", **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": COMPLETIONS, "body": call}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def read_jsonl(data: bytes) -> list[dict[str, Any]]:
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


class BatchClient:
    """A client of one gateway, with an API key or without."""

    def __init__(self, gateway: RunningGateway, key: str = "") -> None:
        self._url = gateway.url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.request(method, self._url + path, **options) as response,
        ):
            return response.status, await response.read()

    async def json(self, method: str, path: str, **options: Any) -> Any:
        """Return the JSON of an answer with the status 200."""
        status, data = await self.call(method, path, **options)
        assert status == 200, data
        return json.loads(data)

    async def upload(self, content: bytes, filename: str = "input.jsonl", **fields: str) -> Any:
        form = aiohttp.FormData({"purpose": "batch", **fields}, quote_fields=False)
        form.add_field("file", content, filename=filename)
        return await self.json("POST", "/v1/files", data=form)

    async def create(self, content: bytes, endpoint: str = CHAT, **more: Any) -> Any:
        """Upload the input of a batch, and create the batch."""
        file = await self.upload(content)
        given = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h", **more}
        return await self.json("POST", "/v1/batches", json=given)

    async def show(self, batch_id: str) -> Any:
        return await self.json("GET", f"/v1/batches/{batch_id}")

    async def ended(self, batch_id: str, timeout_s: float = 60.0) -> Any:
        """Return a batch once it has ended."""
        async with asyncio.timeout(timeout_s):
            while True:
                batch = await self.show(batch_id)
                if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                    return batch
                await asyncio.sleep(0.02)

    async def content(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of a file; none without a file."""
        if file_id is None:
            return []
        status, data = await self.call("GET", f"/v1/files/{file_id}/content")
        assert status == 200, data
        return read_jsonl(data)

    async def outputs(self, batch: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the lines of the output file and those of the error file."""
        return await self.content(batch["output_file_id"]), await self.content(batch["error_file_id"])


# --- batch keys -------------------------------------------------------------------------------------------------------
# API keys for tests of files and batches.


async def with_key(gateway: RunningGateway, project: str = "web", **limits: Any) -> tuple[BatchClient, str]:
    """Make a key; returns a client with it, and the id of the key."""
    store = AccountStore(gateway.gateway.process.keys.client, "test")
    account, secret = await store.create("acme", project, "test", AccountLimits.of(limits))
    return BatchClient(gateway, secret), account.id

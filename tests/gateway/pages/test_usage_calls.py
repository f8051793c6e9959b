"""Usage over HTTP equals what the requests used, recounted from the logs and outcomes in Redis."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.accounts.limits import AccountLimits
from quire.shared.messages import decode_items
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, Reply, RunningGateway, raw_request, tokens

ADMIN = "0123456789abcdef-admin"


async def get(gateway: RunningGateway, path: str, key: str) -> Reply:
    return await gateway.send(raw_request("GET", path, headers={"Authorization": f"Bearer {key}"}))


async def recount(gateway: RunningGateway) -> dict[str, tuple[int, int, int]]:
    """Count requests, prompt tokens and generated tokens of each key from the hashes and the output logs."""
    broker = gateway.gateway.broker
    client: Any = broker.client
    found: dict[str, tuple[int, int, int]] = {}
    async for name in client.scan_iter(broker.keys.request("*")):
        packed_metadata, account, outcome = await client.hmget(name, "metadata", "account", "outcome")
        request_id = name.decode().rsplit(":", 1)[1]
        logged = await client.xrange(broker.keys.output(request_id))
        emitted = max((item.end for _, data in logged for item in decode_items(data[b"item"])), default=0)
        has_computed = emitted or outcome in (b"stop", b"length")
        before = found.get((account or b"").decode(), (0, 0, 0))
        metadata = CallMetadata.decode(packed_metadata)
        prompt = metadata.prompt_tokens // metadata.requests if has_computed else 0
        found[(account or b"").decode()] = (before[0] + 1, before[1] + prompt, before[2] + emitted)
    return found


async def test_the_usage_is_the_sum_of_the_outcomes(start_gateway: Start) -> None:
    gateway = await start_gateway(admin_key=ADMIN)
    store = gateway.gateway.process.key_ring.store
    keys = [(await store.create("acme", "web", f"k{n}", AccountLimits())) for n in range(2)]
    async with gateway.worker(emit(tokens("abcdef"))):
        for turn in range(5):
            account, secret = keys[turn % 2]
            body = {
                "model": MODEL,
                "prompt": ["Hello"] * (1 + turn % 2),
                "max_tokens": 20,
                "n": 1 + turn % 3,
            }
            assert (await gateway.post("/v1/completions", body, Authorization=f"Bearer {secret}")).status == 200
        await gateway.complete(max_tokens=3)  # without a key
    expected = await recount(gateway)
    rows = (await get(gateway, "/admin/usage", ADMIN)).json["data"]
    assert len(rows) == 2
    for row in rows:
        assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == expected[row["key"]]
        assert row["model"] == MODEL
    for account, secret in keys:
        own = (await get(gateway, "/v1/usage?days=1", secret)).json["data"]
        assert own == [row for row in rows if row["key"] == account.id]
    table = (await get(gateway, "/admin/usage?format=csv", ADMIN)).body.decode()
    assert [row["key"] for row in csv.DictReader(io.StringIO(table))] == [row["key"] for row in rows]


@pytest.mark.parametrize("query", ["days=0", "days=401", "days=x", "format=xml", "key=other", "days=1&days=2"])
async def test_wrong_queries_are_refused(query: str, start_gateway: Start) -> None:
    gateway = await start_gateway(admin_key=ADMIN)
    assert (await get(gateway, f"/admin/usage?{query}", ADMIN)).status == 400


async def test_a_caller_without_a_key_has_no_usage(gateway: RunningGateway) -> None:
    assert (await gateway.get("/v1/usage")).status == 401

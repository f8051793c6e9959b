"""Usage is read by day, key and model, and written as CSV."""

from __future__ import annotations

import time

from quire.shared.accounts.usage import DAY_S, UsageRow, as_csv, read_usage
from quire.shared.keys import ACCOUNTS_TAG, AccountKeys
from quire.shared.redis.clients import command_client


async def test_usage_is_read_by_day_key_and_model(redis_url: str) -> None:
    client, keys = command_client(redis_url, ACCOUNTS_TAG), AccountKeys()
    today = int(time.time()) // DAY_S
    counts = {"k m x requests": 2, "k m x prompt": 5, "j m x cost": 10**9, "odd": 1}
    await client.hset(keys.usage(today), mapping=counts)
    await client.hset(keys.usage(today - 1), mapping={"k m x completion": 7})
    await client.hset(keys.usage(today - 2), mapping={"k m x completion": 9})
    rows = await read_usage(client, keys.prefix, 2)
    assert [(row.key, row.model, row.requests, row.prompt, row.completion, row.cost) for row in rows] == [
        ("k", "m x", 0, 0, 7, 0),
        ("j", "m x", 0, 0, 0, 10**9),
        ("k", "m x", 2, 5, 0, 0),
    ]
    assert len(await read_usage(client, keys.prefix, 3, "k")) == 3
    await client.aclose()


def test_no_name_in_the_csv_is_a_formula() -> None:
    text = as_csv([UsageRow("2026-01-02", "k", "=1+1", 1, 2, 3, 5 * 10**8)])
    assert text.splitlines()[1] == "2026-01-02,k,'=1+1,1,2,3,0.5"

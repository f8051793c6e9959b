"""`make soak` finds no violation, and reports a violation that is injected."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from redis import Redis

from quire.ops.benchmarks.soak.__main__ import KEYS, check, is_good, report, state
from quire.ops.benchmarks.soak.client import SoakRecord
from quire.ops.local.embedded_redis import EmbeddedRedis
from tests.conftest import clean_environ

GOOD = {"changed": 0, "accepted": 3, "totals": {"stop": 1, "length": 2}, "pending": 0, "load": [0, 0]}


def record(text: str, logprobs: Sequence[float] = (-1.5, -0.5), outcome: str = "complete") -> SoakRecord:
    body = {"prompt": "x", "stream": True}
    return SoakRecord(body, text={0: text}, logprobs={0: list(logprobs)}, usage_tokens=2, outcome=outcome)


def result(records: list[SoakRecord], **others: Any) -> dict[str, Any]:
    chaos: Any = SimpleNamespace(faults=[])
    return report(records, chaos, 1.0) | GOOD | others


def test_a_soak_without_losses_is_good() -> None:
    assert is_good(result([record("a b")]))


@pytest.mark.parametrize(
    ("records", "others"),
    [
        ([record("a b"), record("a", outcome="")], {}),
        ([record("a b"), record("a", outcome="error")], {}),
        ([record("a b")], {"changed": 1}),
        ([record("a b")], {"accepted": 4}),
        ([record("a b")], {"pending": 1}),
        ([record("a b")], {"load": [0, 1]}),
    ],
    ids=["lost", "failed", "changed", "not counted", "pending", "load"],
)
def test_what_is_lost_or_changed_fails_the_soak(records: list[SoakRecord], others: dict[str, Any]) -> None:
    assert not is_good(result(records, **others))


async def test_the_report_has_what_recovery_did(redis_server: EmbeddedRedis, redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        client.hset(KEYS.totals, mapping={"accepted": 3, "stop": 1, "length": 2})
        client.hset(KEYS.recoveries, mapping={"migrations": 4, "fenced": 5})
    found = await state(redis_server)
    assert (found["accepted"], found["totals"]) == (3, {"stop": 1, "length": 2})
    assert (found["migrations"], found["repairs"], found["fenced"]) == (4, 0, 5)


async def test_texts_that_were_lost_doubled_or_changed_are_found() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert "stream" not in await request.json()
        choice = {"index": 0, "text": "a b", "logprobs": {"token_logprobs": [-1.5, -0.5]}}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 2}})

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        wrong = [record("a"), record("a b b"), record("a c"), record("a b", [-1.5]), record("a b", [-1.5, -0.25])]
        found = await check(f"http://{host}:{port}", [record("a b"), *wrong, record("a b")], 10)
        assert len(found) == len(wrong)
        assert all(one in wrong for one in found)
    finally:
        await runner.cleanup()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_half_a_minute_of_faults_loses_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "quire.ops.benchmarks.soak",
        "--minutes",
        "0.5",
        "--pause-s",
        "4",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["lost"] == found["changed"] == 0
    assert found["requests"] > 0
    assert found["faults"]
    assert {"migrations", "repairs", "fenced"} <= found.keys()

"""The result as JSON."""

from __future__ import annotations

import json

import pytest

from quire.ops.loadgen.result import SCHEMA, as_json
from quire.ops.loadgen.settings import BenchSettings
from tests.support.loadgen import NASTY, finished_run


def test_the_json_has_everything_and_no_secret() -> None:
    settings = BenchSettings(
        against="http://me:word@x", slo="ttft=150ms", json="x.json", save_requests=True, api_key="sk-secret"
    )
    text = json.dumps(as_json(finished_run(settings), settings))
    assert "sk-secret" not in text
    assert "word" not in text
    result = json.loads(text)
    assert result["schema"] == SCHEMA == "quire-bench/1"
    assert set(result) == {
        "schema", "when", "settings", "environment", "load", "stopped", "client", "servers", "comparison", "warnings",
    }  # fmt: skip
    first, second = result["servers"]
    assert (first["good_share"], second["good_share"]) == (0.5, 0.0)
    assert len(first["blocks"]) == 4
    assert len(first["records"]) == 8
    assert first["records"][0]["chunks_s"] == pytest.approx([0.1, 0.2])
    assert first["errors"] == [{"kind": "status 500", "count": 4, "first_message": NASTY}]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert set(first[name]) == {"mean", "p50", "p90", "p95", "p99", "max"}

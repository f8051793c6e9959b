"""The plan of a run, and the settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.ops.loadgen.plan import make_plan, parse_slo
from quire.ops.loadgen.settings import BenchSettings
from quire.shared.settings import SettingError


def test_limits_are_read_with_their_units() -> None:
    assert parse_slo("ttft=500ms, tpot:50ms e2e=2s") == {"ttft": 0.5, "tpot": 0.05, "e2e": 2.0}
    assert parse_slo("") == {}
    for wrong in ("ttft=500", "ttft", "foo=1s", "ttft=1s,ttft=2s", "ttft=0ms", "ttft=-1s"):
        with pytest.raises(SettingError, match=r"^--slo: .*give ttft"):
            parse_slo(wrong)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rate": "3", "concurrency": 2}, "^--rate and --concurrency are both given"),
        ({"requests": 3, "duration_s": 2.0}, "^--requests and --duration-s are both given"),
        ({"rate": "fast"}, "^--rate: 'fast' is no rate; give"),
        ({"rate": "0"}, "^--rate: '0' is no rate; give"),
        ({"rate": "nan"}, "^--rate: 'nan' is no rate; give"),
        ({"rate": "inf", "duration_s": 1.0}, "^--rate: inf .* give --requests"),
        ({"burstiness": 2.0}, "^--burstiness: 2 .* give --rate"),
        ({"input_tokens": 5}, "^--input-tokens: 5 .* give --shape fixed or prefix"),
        ({"shape": "fixed", "prefix_tokens": 5}, "^--prefix-tokens: 5 .* give --shape prefix"),
        ({"endpoint": "chat", "prompts": "ids"}, "^--prompts: ids .* give"),
        ({"save_requests": True}, "^--save-requests: .* give --json"),
        ({"against_model": "m"}, "^--against-model: 'm' .* give --against"),
        ({"against": "http://x", "requests": 3}, "^--requests: 3 .* give --requests 4 or more, or --rounds 3 or fewer"),
        ({"json": "/no/such/folder/x.json"}, "^--json: .* give"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        make_plan(BenchSettings(**given))


def test_blocks_have_all_requests() -> None:
    plan = make_plan(BenchSettings(requests=10, rounds=4, against="http://x"))
    assert [plan.block_requests(index) for index in range(4)] == [2, 3, 2, 3]
    plan = make_plan(BenchSettings(duration_s=8.0, rounds=4, against="http://x", rate="5"))
    assert [plan.block_requests(index) for index in range(4)] == [10, 10, 10, 10]

"""The table of a request's states and transitions, against what the scripts do in random walks."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from quire.shared.protocol.broker.scripts import script_source
from quire.shared.protocol.states import TRANSITIONS
from tests.support import protocol_driver
from tests.support.protocol_driver import KEYS, InstantClient
from tests.support.protocol_machine import walk
from tests.support.redis_server import RedisServer

# id and state of every request of the lane.
STATES = """
local states = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. 'req:*')) do
    local state = redis.call('HGET', key, 'state')
    if state then
        states[#states + 1] = key
        states[#states + 1] = state
    end
end
return states
"""
SCRIPTS = {
    hashlib.sha1(script_source(path.name[:-4]).encode()).hexdigest(): path.name[:-4]
    for path in (files("quire.shared.protocol") / "scripts").iterdir()
    if path.name.endswith(".lua") and not path.name.startswith("_")
}
TABLE = [(step.script, step.before or "", step.after or "") for step in TRANSITIONS]
# Transitions that not all walks reach, and the tests that show them.
SHOWN_BY = {
    ("expire", "queued", "done"): (
        "tests/shared/broker/test_gateway.py::test_a_queued_request_past_its_deadline_is_ended"
    ),
    ("begin", "running", "done"): (
        "tests/shared/broker/test_worker.py::test_what_nobody_wants_any_more_does_not_begin_to_run_alone"
    ),
    ("commit_step", "running", "parked"): (
        "tests/gateway/admission/test_submission.py::test_an_answer_beyond_the_budget_is_parked_at_its_last_token"
    ),
    ("expire", "running", "done"): (
        "tests/shared/broker/test_gateway.py::test_a_running_request_past_its_deadline_is_ended_and_its_worker_told"
    ),
    ("expire", "parked", "done"): (
        "tests/shared/broker/test_parking.py::test_after_its_retention_a_parked_request_ends_once"
    ),
    ("cancel", "parked", "done"): (
        "tests/shared/broker/test_parking.py::test_a_parked_request_ends_when_it_is_cancelled_or_taken_up_too_late"
    ),
    ("unpark", "parked", "queued"): (
        "tests/shared/broker/test_parking.py::test_a_deadline_stands_still_while_a_request_is_parked"
    ),
    ("unpark", "parked", "done"): (
        "tests/shared/broker/test_parking.py::test_a_parked_request_ends_when_it_is_cancelled_or_taken_up_too_late"
    ),
    ("submit", "done", ""): (
        "tests/shared/broker/test_gateway.py::test_room_is_made_in_parts_and_who_needs_more_is_refused_for_now"
    ),
}
Seen = set[tuple[str, str, str]]


class Witness(InstantClient):
    """Notes the transitions of all requests in every call of a script."""

    seen: Seen

    async def execute_command(self, name: str, script: str, *args: Any) -> Any:
        if name not in ("EVAL", "EVALSHA"):
            return await super().execute_command(name, script, *args)
        before = self._states()
        try:
            return await super().execute_command(name, script, *args)
        finally:
            after = self._states()
            sha = script if name == "EVALSHA" else hashlib.sha1(script.encode()).hexdigest()
            for key in before.keys() | after.keys():
                step = before.get(key, ""), after.get(key, "")
                if step[0] != step[1]:
                    self.seen.add((SCRIPTS[sha], *step))

    def _states(self) -> dict[bytes, str]:
        found: list[bytes] = self._client.eval(STATES, 0, KEYS.prefix)  # type: ignore[assignment]
        return {key: state.decode() for key, state in zip(found[::2], found[1::2], strict=True)}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_requests_change_their_states_as_the_table_says(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_driver, "InstantClient", Witness)
    Witness.seen = set()
    walk(redis_server, 40, 200)
    rare = {step for step in SHOWN_BY if step not in Witness.seen}
    assert sorted(Witness.seen | rare) == sorted(TABLE)


@pytest.mark.parametrize("step", SHOWN_BY, ids=" ".join)
def test_a_transition_that_not_all_walks_reach_has_a_test(step: tuple[str, str, str]) -> None:
    path, _, test = SHOWN_BY[step].partition("::")
    assert step in TABLE
    assert f"def {test}(" in (Path(__file__).parents[3] / path).read_text()


def test_the_protocol_page_has_every_transition() -> None:
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    rows = [f"| `{step.before or '-'}` | `{step.after or '-'}` | `{step.script}` {step.when} |" for step in TRANSITIONS]
    assert [row for row in rows if row not in page] == []

"""A worker, or a gateway too, dies inside the arguments of a tool call (case 31): the calls stay as without faults.

The ids of the calls follow from the tokens, so a client can run each tool exactly once, whatever died meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.conftest import QuireProcess
from tests.support.faults.calls import FAST
from tests.support.faults.stack import FaultStack, Stream

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
CALL: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Plan two trips."}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "plan",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "place": {"type": "string", "minLength": 40, "maxLength": 60},
                        "days": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 4, "maxItems": 8},
                    },
                    "required": ["place", "days"],
                    "additionalProperties": False,
                },
            },
        }
    ],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 400,
    "temperature": 1,
    "seed": 11,
}


class Tools:
    """Two gateways, and one worker."""

    def __init__(self, stack: FaultStack) -> None:
        self.stack = stack
        flags = ("--tool-call-format", "hermes")
        self.url, self.other_url = stack.gateway(*flags)[1], stack.gateway(*flags)[1]
        self.worker = self._start()

    def _start(self) -> QuireProcess:
        return self.stack.worker("a", *FAST)

    def kill_at(self, stream: Stream, token: int) -> None:
        """Kills the worker when the log holds `token` tokens, and starts it again."""
        self.stack.wait(lambda: stream.response_headers)
        key = self.stack.keys.request(stream.response_headers["x-request-id"])
        self.stack.wait(lambda: int(self.stack.redis.hget(key, "emitted") or 0) >= token)
        os.kill(self.worker.process.pid, signal.SIGKILL)
        self.restart()

    def restart(self) -> None:
        """Starts the killed worker again."""
        self.worker.wait()
        self.worker = self._start()


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    stack = FaultStack(tmp_path_factory.mktemp("tools"), PROJECT_ROOT / DEFAULT_MODEL)
    try:
        yield Tools(stack)
    finally:
        stack.close()


def message(stream: Stream) -> dict[str, Any]:
    """Adds up the tool calls of a stream."""
    calls: list[dict[str, Any]] = []
    content = ""
    for chunk in stream.parsed:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return {"content": content, "calls": calls}


def without_ids(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "calls": [{**call, "id": ""} for call in found["calls"]]}


@pytest.mark.promise
def test_a_worker_that_dies_inside_the_arguments_changes_no_call(tools: Tools) -> None:
    whole = Stream(tools.url, CALL, path=CHAT).wait_end()
    assert whole.status == 200, whole.text_body
    asked = whole.answer["choices"][0]["message"]["tool_calls"]
    expected = [{"id": "", "name": "plan", "arguments": call["function"]["arguments"]} for call in asked]
    assert expected
    for call in expected:
        assert set(json.loads(call["arguments"])) == {"place", "days"}
    undisturbed = Stream(tools.url, CALL | {"stream": True}, path=CHAT).wait_end()
    assert without_ids(message(undisturbed)) == {"content": "", "calls": expected}
    tokens = whole.answer["usage"]["completion_tokens"]
    for token in (tokens // 3, 2 * tokens // 3):
        stream = Stream(tools.url, CALL | {"stream": True}, path=CHAT)
        tools.kill_at(stream, token)
        found = message(stream.wait_end())
        assert stream.is_complete
        assert without_ids(found) == {"content": "", "calls": expected}
        # Another gateway reads the whole stream from the log: the same events, with the same ids of the calls.
        path = f"{CHAT}/{stream.parsed[0]['id']}/stream"
        again = Stream(tools.other_url, {}, path=path, method="GET").wait_end()
        assert [(event.id, event.data) for event in again.events] == [(event.id, event.data) for event in stream.events]
    tools.stack.assert_invariants()


END = json.loads((PROJECT_ROOT / DEFAULT_MODEL / "config.json").read_text())["eos_token_id"]
# Some calls are complete before the fault and some after it: without an end token, calls follow up to max_tokens.
CALLS = CALL | {"parallel_tool_calls": True, "stream": True, "max_tokens": 300, "logit_bias": {str(END): -100}}
RESPONSE = {
    "model": "tiny",
    "input": CALLS["messages"],
    "tools": [{"type": "function", **CALL["tools"][0]["function"]}],
    "max_output_tokens": CALLS["max_tokens"],
    **{
        name: CALLS[name]
        for name in ("tool_choice", "parallel_tool_calls", "temperature", "seed", "stream", "logit_bias")
    },
}


def complete_calls(path: str, events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(id, arguments) of the calls that are complete in the first events of a stream."""
    if path == RESPONSES:
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        return [(item["call_id"], item["arguments"]) for item in items if item["status"] == "completed"]
    found: list[tuple[str, str]] = []
    is_last_complete = False
    for choice in [choice for event in events for choice in event["choices"]]:
        is_last_complete |= choice["finish_reason"] == "tool_calls"
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                found.append((call["id"], ""))
            found[-1] = (found[-1][0], found[-1][1] + call["function"]["arguments"])
    return found if is_last_complete else found[:-1]


@pytest.mark.parametrize(("path", "body"), [(CHAT, CALLS), (RESPONSES, RESPONSE)], ids=["chat", "response"])
@pytest.mark.promise
def test_a_client_executes_each_call_once_though_worker_and_gateway_die(
    tools: Tools, path: str, body: dict[str, Any]
) -> None:
    """The client resumes at another gateway after its last event, or reads the whole stream again. It remembers ids."""
    expected = complete_calls(path, Stream(tools.url, body, path=path).wait_end().parsed)
    assert len(expected) > 1
    gateway, url = tools.stack.gateway("--tool-call-format", "hermes")
    stream = Stream(url, body, path=path)
    tools.stack.wait(lambda: complete_calls(path, list(stream.parsed)))
    os.kill(tools.worker.process.pid, signal.SIGKILL)
    os.kill(gateway.pid, signal.SIGKILL)
    stream.wait_end()
    tools.restart()
    assert not stream.is_complete
    before = complete_calls(path, stream.parsed)
    assert 0 < len(before) < len(expected)
    first = stream.parsed[0]
    target = f"{path}/{first['id']}/stream" if path == CHAT else f"{path}/{first['response']['id']}?stream=true"
    last = {"Last-Event-ID": stream.events[-1].id}
    rest = Stream(tools.other_url, {}, last, target, "GET").wait_end()
    again = Stream(tools.url, {}, {}, target, "GET").wait_end()
    assert rest.is_complete
    assert again.is_complete
    # Each client executes at once what it reads, and skips the ids that it has executed.
    for read in (stream.parsed + rest.parsed, again.parsed):
        executed = dict(before)
        executed |= {name: arguments for name, arguments in complete_calls(path, read) if name not in executed}
        assert list(executed.items()) == complete_calls(path, again.parsed)
    assert [arguments for _, arguments in executed.items()] == [arguments for _, arguments in expected]
    tools.stack.assert_invariants()

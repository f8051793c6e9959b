"""One seeded call in each dialect, with tools and without, is equal in every field but ids and times: the whole answer,
the concatenated stream, the stream resumed at another gateway, and both answers whose worker was killed (case 31)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.faults.test_tool_calls import CALL, CHAT, RESPONSES, Tools
from tests.support.faults.stack import Event, FaultStack, Stream
from tests.support.gateway.agents import MessageEvent, assembled

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

MESSAGES = "/v1/messages"
FUNCTION = CALL["tools"][0]["function"]
SAMPLING = {"model": "tiny", "temperature": 1, "seed": 11}
STORY = [{"role": "user", "content": "Tell me a story about a lantern."}]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat with tools": (CHAT, CALL),
    "chat with logprobs": (
        CHAT,
        {**SAMPLING, "messages": STORY, "max_tokens": 60, "logprobs": True, "top_logprobs": 2},
    ),
    "response with tools": (
        RESPONSES,
        {
            **SAMPLING,
            "input": CALL["messages"],
            "max_output_tokens": 400,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    "response with logprobs": (
        RESPONSES,
        {
            **SAMPLING,
            "input": STORY,
            "max_output_tokens": 60,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
    ),
    "message with tools": (
        MESSAGES,
        {
            **SAMPLING,
            "messages": CALL["messages"],
            "max_tokens": 400,
            "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
    "message": (MESSAGES, {**SAMPLING, "messages": STORY, "max_tokens": 60}),
}
# Fields that differ between two calls. The fingerprint has no digest of the weights while no worker is registered.
OWN = ("id", "created", "created_at", "object", "system_fingerprint")


def without_own(value: Any) -> Any:
    """A value without the ids and times of its call: the ids of items and tool calls follow from that of the call."""
    if isinstance(value, dict):
        return {key: without_own(one) for key, one in value.items() if key not in OWN}
    if isinstance(value, list):
        return [without_own(one) for one in value]
    if isinstance(value, str):
        return re.sub(r"^(call|toolu)_[0-9a-f]{24}$", r"\1_", value)
    return value


def chat_of(events: list[Any]) -> Any:
    """The whole answer that the events of a chat add up to."""
    message: dict[str, Any] = {"role": "", "content": "", "refusal": None, "annotations": []}
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
    answer: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for event in events:
        answer |= event
        for one in event["choices"]:
            delta = one["delta"]
            message["role"] += delta.get("role", "")
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(calls):
                    calls.append(
                        {"type": call["type"], "function": {"name": call["function"]["name"], "arguments": ""}}
                    )
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if one["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"]["content"] += one["logprobs"]["content"]
            if one["finish_reason"] is not None:
                choice |= {key: one[key] for key in ("finish_reason", "stop_reason")}
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return {**answer, "choices": [choice]}


def response_of(events: list[Any]) -> Any:
    """The response of the last event, whose texts are those of the deltas."""
    response = events[-1]["response"]
    texts: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            at = event["output_index"]
            texts[at] = texts.get(at, "") + event["delta"]
            logprobs.setdefault(at, []).extend(event.get("logprobs", []))
    for at, item in enumerate(response["output"]):
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts[at] == whole
        if item["type"] == "message":
            assert logprobs[at] == item["content"][0]["logprobs"]
    return response


def message_of(events: list[Any]) -> Any:
    """The message that the events add up to."""
    return assembled([MessageEvent(None, event["type"], event) for event in events])


ADDED_UP: dict[str, Callable[[list[Any]], Any]] = {CHAT: chat_of, RESPONSES: response_of, MESSAGES: message_of}


def public_id(path: str, first: dict[str, Any]) -> str:
    found: str = {CHAT: first, RESPONSES: first.get("response"), MESSAGES: first.get("message")}[path]["id"]  # type: ignore[index]
    return found


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    stack = FaultStack(tmp_path_factory.mktemp("equal"), PROJECT_ROOT / DEFAULT_MODEL)
    try:
        yield Tools(stack)
    finally:
        stack.close()


@pytest.mark.parametrize(("path", "body"), CASES.values(), ids=CASES)
def test_an_answer_is_the_same_whole_streamed_resumed_and_with_its_worker_killed(
    tools: Tools, path: str, body: dict[str, Any]
) -> None:
    salts = count()
    streaming = {"stream": True} | ({"stream_options": {"include_usage": True}} if path == CHAT else {})

    def asked(**more: Any) -> dict[str, Any]:
        # A salt of its own: a prompt that is cached by an earlier call has other numbers of cached tokens.
        return {**body, **more, "cache_salt": f"{path}{next(salts)}"}

    def pairs(events: list[Event]) -> list[tuple[str, str]]:
        return [(event.id, event.data) for event in events]

    def answer(stream: Stream) -> Any:
        assert stream.status == 200, stream.text_body
        return without_own(ADDED_UP[path](stream.parsed))

    whole = Stream(tools.url, asked(), path=path).wait_end()
    assert whole.status == 200, whole.text_body
    expected = without_own(whole.answer)
    tokens = expected["usage"]["output_tokens" if path != CHAT else "completion_tokens"]
    assert tokens > 30
    # 1) Concatenated.
    stream = Stream(tools.url, asked(**streaming), path=path).wait_end()
    assert answer(stream) == expected
    # 2) Resumed at another gateway, at some events.
    resume = f"{path}/{public_id(path, stream.parsed[0])}" + ("?stream=true" if path == RESPONSES else "/stream")
    for at in (0, 1, len(stream.events) // 3, 2 * len(stream.events) // 3, len(stream.events) - 3):
        last = {"Last-Event-ID": stream.events[at].id}
        rest = Stream(tools.other_url, {}, last, resume, "GET").wait_end()
        assert rest.status == 200, rest.text_body
        assert pairs(stream.events[: at + 1] + rest.events) == pairs(stream.events)
    # 3) With the worker killed in the middle, at two places.
    for place in (tokens // 3, 2 * tokens // 3):
        killed = Stream(tools.url, asked(**streaming), path=path)
        tools.kill_at(killed, place)
        assert answer(killed.wait_end()) == expected
    # 4) The whole answer with its worker killed: the same call, whose client waits.
    waiting = Stream(tools.url, asked(), path=path, headers={"X-Request-Id": "waiting"})
    key = tools.stack.keys.prefix + "req:*"
    running = list[bytes]()

    def is_halfway() -> bool:
        running[:] = [
            one for one in tools.stack.redis.scan_iter(key) if tools.stack.redis.hget(one, "state") == b"running"
        ]
        return any(int(tools.stack.redis.hget(one, "emitted") or 0) >= tokens // 2 for one in running)

    tools.stack.wait(is_halfway)
    tools.worker.process.kill()
    tools.restart()
    assert without_own(json.loads(waiting.wait_end().text_body)) == expected
    tools.stack.streams.clear()  # the answers are compared here; the invariants know those of completions
    tools.stack.assert_invariants()

"""Answers of the Messages API: whole, streamed and resumed, with their headers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageDeltaUsage, TextBlock, ThinkingBlock, ToolUseBlock, Usage
from anthropic.types.raw_message_delta_event import Delta as MessageDelta
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from quire.gateway.api.messages.answer import MessageAnswer
from quire.gateway.api.messages.events import BlockWriter, blocks
from quire.gateway.api.messages.headers import KNOWN_BETAS, MAX_BETAS, check_headers
from quire.gateway.api.messages.signature import hidden_text, sign
from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.model.served_model import load_model
from quire.gateway.output.parts import AnswerPart, PartKind, merged
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.transcript import Choice
from quire.shared.protocol.messages import Delta, Outcome
from tests.support.gateway.agents import (
    assembled,
    body,
    parse_message_events,
    prompt_of,
    saying,
    stream_events,
)
from tests.support.gateway.running import CONTEXT, MODEL, RunningGateway, byte_level, tokens

# --- Messages with the `anthropic` SDK, unmodified: whole, streamed, resumed; tools, thinking, stop sequences ---------


HELLO: Any = [{"role": "user", "content": "Hello"}]


async def test_a_message(client: anthropic.AsyncAnthropic, agent_gateway: RunningGateway) -> None:
    async with agent_gateway.worker(saying("Hello, w\u00f6rld \U0001f600!")) as worker:
        message = await client.messages.create(model=MODEL, max_tokens=50, messages=HELLO, system="Be kind.")
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    [block] = message.content
    assert block.type == "text"
    assert block.text == "Hello, w\u00f6rld \U0001f600!"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == len(worker.claimed[0].prompt)
    assert message.usage.output_tokens == len(tokens("Hello, w\u00f6rld \U0001f600!"))
    assert (message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens) == (0, 0)
    assert message._request_id == message.id.removeprefix("msg_")
    assert prompt_of(worker.claimed[0]) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert worker.claimed[0].sampling.max_tokens == 50


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (("stop", None), ("end_turn", None)),
        (("stop", "END"), ("stop_sequence", "END")),
        (("length", None), ("max_tokens", None)),
    ],
)
async def test_the_reason_of_the_end(
    client: anthropic.AsyncAnthropic,
    agent_gateway: RunningGateway,
    end: tuple[str, str | None],
    expected: tuple[str, str | None],
) -> None:
    text = "one two END" if end[1] else "one two"
    limit = len(tokens(text))
    async with agent_gateway.worker(saying(text, *end)) as worker:
        whole = await client.messages.create(
            model=MODEL, max_tokens=limit, messages=HELLO, stop_sequences=["END", "never"]
        )
        async with client.messages.stream(
            model=MODEL, max_tokens=limit, messages=HELLO, stop_sequences=["END", "never"]
        ) as stream:
            streamed = await stream.get_final_message()
    assert worker.claimed[0].sampling.stop == ("END", "never")
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == expected
        assert text_of(message).strip() == "one two"


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def test_a_stop_sequence_that_is_a_special_token(
    client: anthropic.AsyncAnthropic, agent_gateway: RunningGateway
) -> None:
    stop = byte_level().token_to_id("<|im_start|>")

    async def script(request: Any) -> Any:
        yield (Delta(0, (*tokens("abc"), stop), "stop", ""),), Outcome("stop")

    async with agent_gateway.worker(script):
        message = await client.messages.create(
            model=MODEL, max_tokens=50, messages=HELLO, stop_sequences=["<|im_start|>"]
        )
    assert (message.stop_reason, message.stop_sequence, text_of(message)) == ("stop_sequence", "<|im_start|>", "abc")


async def test_more_tokens_than_the_context_has_left_are_a_bound(
    client: anthropic.AsyncAnthropic, agent_gateway: RunningGateway
) -> None:
    """Coding agents ask for 32,000 tokens whatever the context."""
    async with agent_gateway.worker(saying("cut", "length")) as worker:
        message = await client.messages.create(model=MODEL, max_tokens=32_000, messages=HELLO)
        assert worker.claimed[0].sampling.max_tokens == CONTEXT - len(worker.claimed[0].prompt)
    assert message.stop_reason == "model_context_window_exceeded"


async def test_no_tokens_compute_the_prompt_only(agent_gateway: RunningGateway) -> None:
    async with agent_gateway.worker(saying("x", "length")) as worker:
        whole = (await agent_gateway.post("/v1/messages", body(max_tokens=0))).json
        events = await stream_events(agent_gateway, "/v1/messages", body(max_tokens=0, stream=True))
    assert worker.claimed[0].sampling.max_tokens == 1
    assert whole["content"] == assembled(events)["content"] == []
    assert whole["stop_reason"] == assembled(events)["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == 0
    assert [event.name for event in events] == ["message_start", "ping", "message_delta", "message_stop"]


async def test_the_answer_continues_a_last_message_of_the_assistant(
    client: anthropic.AsyncAnthropic, agent_gateway: RunningGateway
) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "The best answer is ( "}]
    async with agent_gateway.worker(saying(" B)")) as worker:
        message = await client.messages.create(model=MODEL, max_tokens=50, messages=messages)
    assert prompt_of(worker.claimed[0]).endswith("<|im_start|>assistant\nThe best answer is ( ")
    assert text_of(message) == " B)"


async def test_thinking_reaches_the_template_and_may_be_hidden(
    client: anthropic.AsyncAnthropic, agent_gateway: RunningGateway
) -> None:
    off: Any = {"thinking": {"type": "disabled"}}
    low: Any = {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive", "display": "omitted"}}
    async with agent_gateway.worker(saying("<think>Hm.</think>Yes.")) as worker:
        await client.messages.create(model=MODEL, max_tokens=50, messages=HELLO, **off)
        hidden = await client.messages.create(model=MODEL, max_tokens=50, messages=HELLO, **low)
    assert hidden.usage.output_tokens_details is not None
    assert hidden.usage.output_tokens_details.thinking_tokens == len(tokens("<think>Hm."))
    assert prompt_of(worker.claimed[0]).endswith("<think>\n\n</think>\n\n")
    assert prompt_of(worker.claimed[1]).endswith("<|im_start|>assistant\neffort=low ")
    assert [(block.type, getattr(block, "thinking", None)) for block in hidden.content] == [
        ("thinking", ""),
        ("text", None),
    ]


async def test_sampling_parameters_reach_the_worker(agent_gateway: RunningGateway) -> None:
    asked = body(temperature=0.5, top_p=0.9, top_k=7, seed=3, cache_salt="s")
    async with agent_gateway.worker(saying("x")) as worker:
        answer = (await agent_gateway.post("/v1/messages", {**asked, "priority": "interactive"})).json
    [request] = worker.claimed
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert request.cache_salt == "s"
    assert answer["usage"]["service_tier"] == "priority"


async def test_a_prompt_longer_than_the_context_is_counted(
    client: anthropic.AsyncAnthropic, agent_gateway: RunningGateway
) -> None:
    """Agents count to find out that they must shorten the conversation."""
    count = await client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "word " * 1000}])
    assert count.input_tokens > 1000


def test_cached_tokens_are_apart_from_the_input_tokens(agent_model: Any) -> None:
    model = load_model(str(agent_model), MODEL)
    echo = '{"max_tokens": 9, "hides_thinking": false, "tier": "standard"}'
    form = MessageAnswer("msg_1", "1", model, CallMetadata("message", 0, 1, False, (), 10, 1, False, echo=echo))
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    expected = {"input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 3}
    form.finish(0, "stop")
    [delta, _] = parse_message_events("".join(form.ending(usage)))
    [whole] = form.full([Choice("", "stop")], usage)
    for found in (delta.data["usage"], json.loads(whole)["usage"]):
        assert {name: found[name] for name in expected} == expected
    [start, _] = parse_message_events("".join(form.opening({**usage, "completion_tokens": 0})))
    found = start.data["message"]["usage"]
    assert {name: found[name] for name in expected} == expected | {"output_tokens": 0}
    assert start.data["message"]["content"] == []


def test_the_fields_are_those_of_the_types_of_the_sdk(agent_model: Any) -> None:
    """Clients in typed languages require every field of the specification, also those that are null here."""
    model = load_model(str(agent_model), MODEL)
    echo = '{"max_tokens": 9, "hides_thinking": false, "tier": "standard"}'
    form = MessageAnswer("msg_1", "1", model, CallMetadata("message", 0, 1, False, (), 10, 1, False, echo=echo))
    usage = {"prompt_tokens": 10, "completion_tokens": 3}
    parts = [
        AnswerPart(PartKind.CONTENT, "a"),
        AnswerPart(PartKind.REASONING, "b"),
        AnswerPart(PartKind.CALL, "c", 0, "call_1"),
        AnswerPart(PartKind.ARGUMENTS, "{}", 0),
    ]
    [text] = form.full([Choice("", "stop", parts=parts)], usage)
    whole = json.loads(text)
    # The SDK has a field for diagnostics, which only a request with this parameter gets, and for toolsets.
    assert set(Message.model_fields) - set(whole) == {"diagnostics"}
    assert set(Usage.model_fields) - set(whole["usage"]) == {"speed"}
    for block, cls in zip(whole["content"], (TextBlock, ThinkingBlock, ToolUseBlock), strict=True):
        assert set(cls.model_fields) - set(block) <= {"toolset_name"}
        cls.model_validate(block, strict=True)
    Message.model_validate(whole)
    [delta, _] = parse_message_events("".join(form.ending(usage)))
    assert set(MessageDeltaUsage.model_fields) == set(delta.data["usage"])
    assert set(MessageDelta.model_fields) == set(delta.data["delta"])


# --- The blocks of a message, streamed and whole ----------------------------------------------------------------------


PARTS = [
    AnswerPart(PartKind.REASONING, "Hm"),
    AnswerPart(PartKind.REASONING, "."),
    AnswerPart(PartKind.CONTENT, "I look. "),
    AnswerPart(PartKind.CALL, "read", 0, "call_00ff"),
    AnswerPart(PartKind.ARGUMENTS, '{"path": ', 0, ""),
    AnswerPart(PartKind.ARGUMENTS, '"\u00e9\\n"}', 0, ""),
    AnswerPart(PartKind.CALL, "now", 1, "call_00fe"),
    AnswerPart(PartKind.ARGUMENTS, "{}", 1, ""),
]
DIRECT = {"caller": {"type": "direct"}}


def data_of(events: list[str]) -> list[dict[str, Any]]:
    found = []
    for event in events:
        name, data, *end = event.split("\n")
        assert end == ["", ""]
        assert event.isascii()
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client makes of the events."""
    found: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    open_block: int | None = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(found)
            open_block = event["index"]
            found.append(event["content_block"])
        else:
            assert event["index"] == open_block
            if event["type"] == "content_block_stop":
                open_block = None
                continue
            delta = {key: item for key, item in event["delta"].items() if key != "type"}
            [(field, text)] = delta.items()
            if field == "partial_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + text
            else:
                found[-1][field] += text
    assert open_block is None
    for index, text in inputs.items():
        found[index]["input"] = json.loads(text)
    return found


def test_the_whole_message_has_the_same_blocks() -> None:
    writer = BlockWriter()
    events = data_of([*writer.parts(PARTS), *writer.close()])
    whole = blocks(merged(PARTS))
    assert assembled_events(events) == whole
    assert whole == [
        {"type": "thinking", "thinking": "Hm.", "signature": "sha256-" + hashlib.sha256(b"Hm.").hexdigest()},
        {"type": "text", "text": "I look. ", "citations": []},
        {"type": "tool_use", "id": "toolu_00ff", "name": "read", "input": {"path": "\u00e9\n"}, **DIRECT},
        {"type": "tool_use", "id": "toolu_00fe", "name": "now", "input": {}, **DIRECT},
    ]


def call_parts(pieces: list[str]) -> list[AnswerPart]:
    texts = ['{"a": "', *(json.dumps(piece)[1:-1] for piece in pieces), '"}']
    return [
        AnswerPart(PartKind.CALL, "tool", 0, "call_1"),
        *(AnswerPart(PartKind.ARGUMENTS, text, 0) for text in texts),
    ]


kinds = st.sampled_from([PartKind.CONTENT, PartKind.REASONING])
groups = st.builds(lambda kind, text: [AnswerPart(kind, text)], kinds, st.text(max_size=5)) | st.builds(
    call_parts, st.lists(st.text(max_size=3), max_size=3)
)
answers = st.lists(groups, max_size=6).map(lambda found: [part for group in found for part in group])


@given(answers, st.integers(1, 4))
def test_streamed_and_whole_agree_however_the_parts_are_grouped(parts: list[AnswerPart], size: int) -> None:
    numbered, number = [], -1
    for part in parts:
        number += part.kind == PartKind.CALL
        numbered.append(part._replace(call=number) if part.call >= 0 else part)
    one, many = BlockWriter(), BlockWriter()
    single = [event for part in numbered for event in one.parts([part])] + one.close()
    grouped = [event for at in range(0, len(numbered), size) for event in many.parts(numbered[at : at + size])]
    assert single == grouped + many.close()
    whole = blocks(merged([part for part in numbered if part.text or part.kind == PartKind.CALL]))
    assert assembled_events(data_of(single)) == whole


# --- The signatures of thinking blocks --------------------------------------------------------------------------------


@given(st.text())
def test_a_hidden_text_comes_back(text: str) -> None:
    assert hidden_text(sign(text, True)) == text
    assert hidden_text(sign(text, False)) == ""


@pytest.mark.parametrize("signature", ["", "EqQBCgIYAhIM", "sha256-00"])
def test_other_signatures_carry_no_text(signature: str) -> None:
    assert hidden_text(signature) == ""


@pytest.mark.parametrize("signature", ["base64-*", "base64-/w=="])
def test_a_damaged_text_is_an_error(signature: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        hidden_text(signature)


# --- The headers of the Messages API ----------------------------------------------------------------------------------


def check(*pairs: tuple[str, str]) -> list[str]:
    return check_headers(CIMultiDictProxy(CIMultiDict(pairs)))


def test_the_version_may_be_missing_or_any_date() -> None:
    assert check() == []
    assert check(("anthropic-version", "2023-06-01"), ("x-api-key", "secret")) == []
    assert check(("anthropic-version", "2031-01-01")) == []


@pytest.mark.parametrize("version", ["latest", "", "2023-6-1", "2023-06-01x", "v" * 500])
def test_a_version_that_is_no_date_is_refused(version: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(("anthropic-version", version))
    assert caught.value.param == "anthropic-version"
    assert len(caught.value.message) < 300


def test_unknown_betas_are_named_once_and_known_ones_are_not() -> None:
    known = min(KNOWN_BETAS)
    found = check(("anthropic-beta", f"claude-code-20250219, {known},claude-code-20250219"), ("anthropic-beta", "x-1,"))
    assert found == ["claude-code-20250219", "x-1"]


@pytest.mark.parametrize("value", ["two words", "a\u00e9", "x" * 101, ",".join(["b"] * (MAX_BETAS + 1))])
def test_betas_that_are_no_names_are_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(("anthropic-beta", value))
    assert caught.value.param == "anthropic-beta"

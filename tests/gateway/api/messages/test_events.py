"""The blocks of a message, streamed and whole."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.api.messages.events import BlockWriter, blocks, tool_use_id
from quire.gateway.api.messages.signature import hidden_text
from quire.gateway.output.parts import AnswerPart, PartKind, merged

ANSWER = [
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


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
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


def test_the_events_of_an_answer() -> None:
    writer = BlockWriter()
    events = data_of([*writer.parts(ANSWER), *writer.close()])
    assert [event.get("delta", event.get("content_block", {})).get("type") for event in events] == [
        *("thinking", "thinking_delta", "thinking_delta", "signature_delta", None),
        *("text", "text_delta", None),
        *("tool_use", "input_json_delta", "input_json_delta", None),
        *("tool_use", "input_json_delta", None),
    ]
    assert events[8]["content_block"] == {
        "type": "tool_use",
        "id": "toolu_00ff",
        "name": "read",
        "input": {},
        "caller": {"type": "direct"},
    }
    assert writer.close() == []


def test_the_whole_message_has_the_same_blocks() -> None:
    writer = BlockWriter()
    events = data_of([*writer.parts(ANSWER), *writer.close()])
    whole = blocks(merged(ANSWER))
    assert assembled(events) == whole
    assert whole == [
        {"type": "thinking", "thinking": "Hm.", "signature": "sha256-" + hashlib.sha256(b"Hm.").hexdigest()},
        {"type": "text", "text": "I look. ", "citations": []},
        {"type": "tool_use", "id": "toolu_00ff", "name": "read", "input": {"path": "\u00e9\n"}, **DIRECT},
        {"type": "tool_use", "id": "toolu_00fe", "name": "now", "input": {}, **DIRECT},
    ]


def test_a_call_that_the_answer_ended_in_is_not_in_the_whole_message() -> None:
    cut = merged([*ANSWER[:-1], AnswerPart(PartKind.ARGUMENTS, '{"zone": "U', 1)])
    assert blocks(cut) == blocks(merged(ANSWER))[:-1]


def test_hidden_thinking_has_its_signature_and_no_text() -> None:
    writer = BlockWriter(hides_thinking=True)
    found = assembled(data_of([*writer.parts(ANSWER[:3]), *writer.close()]))
    assert found == blocks(merged(ANSWER[:3]), hides_thinking=True)
    assert found[0]["thinking"] == ""
    assert hidden_text(found[0]["signature"]) == "Hm."


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
    assert assembled(data_of(single)) == whole


def test_the_id_of_a_tool_use_follows_from_the_id_of_the_call() -> None:
    assert tool_use_id(AnswerPart(PartKind.CALL, "x", 0, "call_12")) == "toolu_12"

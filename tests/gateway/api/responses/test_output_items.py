"""Output items from parts: order, ids, statuses, log-probabilities."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from quire.gateway.api.responses.output_items import ItemStatus, OutputItems, item_place
from quire.gateway.model.served_model import load_model
from quire.gateway.model.token_texts import TokenTexts
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.stream.choice_text import ScoredTokens
from tests.support.gateway.running import tokens
from tests.support.tokenizers import byte_level

CONTENT, REASONING = PartKind.CONTENT, PartKind.REASONING


@pytest.fixture
def output() -> OutputItems:
    return OutputItems("0" * 32, TokenTexts(byte_level()))


def push(
    output: OutputItems, *parts: AnswerPart, scored: ScoredTokens | None = None
) -> list[tuple[str, str | None, bool]]:
    return [(change.item.id[:3], change.delta, change.is_end) for change in output.push(parts, scored)]


def scored(text: str) -> ScoredTokens:
    ids = tokens(text)
    return ScoredTokens(tuple(ids), b"".join(struct.pack("<f", -1.0) for _ in ids), (0,) * len(ids))


def test_items_begin_grow_and_end_in_order(output: OutputItems) -> None:
    assert push(output, AnswerPart(REASONING, "a")) == [("rs_", None, False), ("rs_", "a", False)]
    assert push(output, AnswerPart(REASONING, "b"), AnswerPart(CONTENT, "c")) == [
        ("rs_", "b", False),
        ("rs_", None, True),
        ("msg", None, False),
        ("msg", "c", False),
    ]
    assert push(output, AnswerPart(CONTENT, "")) == []
    assert push(output, AnswerPart(PartKind.CALL, "f", 0, "call_1"), AnswerPart(PartKind.ARGUMENTS, "{}", 0)) == [
        ("msg", None, True),
        ("fc_", None, False),
        ("fc_", "{}", False),
    ]
    assert push(output, AnswerPart(PartKind.CALL, "g", 1, "call_2")) == [("fc_", None, True), ("fc_", None, False)]
    assert push(output, AnswerPart(PartKind.ARGUMENTS, "{}", 1)) == [("fc_", "{}", False)]
    assert [change.is_end for change in output.finish("stop")] == [True]
    items = json.loads(output.json())
    assert [item["id"] for item in items] == [
        f"{kind}_{'0' * 32}_{at}" for at, kind in enumerate(("rs", "msg", "fc", "fc"))
    ]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "ab"}]
    assert items[1]["content"][0]["text"] == "c"
    assert (items[2]["call_id"], items[2]["name"], items[2]["arguments"]) == ("call_1", "f", "{}")
    assert {item["status"] for item in items} == {"completed"}


@pytest.mark.parametrize("reason", ["length", "stop", "failure"])
def test_only_the_open_item_is_incomplete(output: OutputItems, reason: str) -> None:
    push(output, AnswerPart(REASONING, "a"), AnswerPart(CONTENT, "c"))
    if reason == "failure":
        output.fail()
    else:
        assert len(list(output.finish(reason))) == 1
    last = ItemStatus.COMPLETED if reason == "stop" else ItemStatus.INCOMPLETE
    assert [item.status for item in output.items] == [ItemStatus.COMPLETED, last]


@pytest.mark.parametrize(
    ("reason", "arguments", "status"),
    [
        ("stop", '{"a": ', ItemStatus.INCOMPLETE),
        ("stop", "", ItemStatus.INCOMPLETE),
        ("length", '{"a": ', ItemStatus.INCOMPLETE),
        ("length", "{}", ItemStatus.COMPLETED),
        ("tool_calls", "{}", ItemStatus.COMPLETED),
    ],
)
def test_a_function_call_is_complete_if_its_arguments_are(
    output: OutputItems, reason: str, arguments: str, status: ItemStatus
) -> None:
    push(output, AnswerPart(PartKind.CALL, "f", 0, "call_1"), AnswerPart(PartKind.ARGUMENTS, arguments, 0))
    list(output.finish(reason))
    assert output.items[0].status == status
    assert output.is_cut == (status == ItemStatus.INCOMPLETE or reason == "length")


def test_an_answer_without_parts_has_no_items(output: OutputItems) -> None:
    assert list(output.finish("stop")) == []
    assert output.json() == "[]"


def test_log_probabilities_belong_to_the_text_of_a_message(output: OutputItems) -> None:
    push(output, AnswerPart(REASONING, "a"), scored=scored("a"))
    push(output, scored=scored("</think>"))  # a marker
    push(output, scored=scored("<"))  # held back, because it may begin a marker
    push(output, AnswerPart(CONTENT, "<x"), scored=scored("x"))
    push(output, scored=scored("<"))
    push(output, AnswerPart(CONTENT, "<y"), scored=scored("y"))
    push(output, scored=scored("</s>"))
    list(output.finish("stop"))
    message = json.loads(output.json())[1]
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["<", "x", "<", "y"]


def test_an_id_tells_the_place_of_its_item(output: OutputItems) -> None:
    push(output, AnswerPart(CONTENT, "a"), AnswerPart(PartKind.CALL, "f"))
    assert item_place(output.items[1].id) == ("0" * 32, 1)
    for other in ("", "msg", "msg_", "msg_1", "msg__1", "msg_a_-1", "msg_a_1234567", "msg_a_x"):
        assert item_place(other) is None, other


def test_the_texts_of_a_model_are_those_of_its_tokenizer(model_folder: Path) -> None:
    assert load_model(str(model_folder), "", False).token_texts[tokens("a")[0]].text == '"a"'

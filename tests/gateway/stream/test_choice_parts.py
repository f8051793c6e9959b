from __future__ import annotations

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.parts import AnswerPart, PartKind, PlainText, call_id
from quire.gateway.output.tools import Tool
from quire.gateway.stream.choice_parts import ChoiceParts

REQUEST = "0" * 32
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


class Scripted:
    """A parser that returns the parts of a script for its texts."""

    def __init__(self, **script: list[AnswerPart]) -> None:
        self._script = script

    def push(self, text: str) -> list[AnswerPart]:
        return self._script[text]

    def finish(self) -> list[AnswerPart]:
        return self._script["finish"]


def test_plain_text_is_content() -> None:
    parts = ChoiceParts(PlainText(), REQUEST, 0)
    assert parts.push("a", 1) == (AnswerPart(PartKind.CONTENT, "a"),)
    assert parts.push("", 1) == ()
    assert parts.finish("b") == (AnswerPart(PartKind.CONTENT, "b"),)
    assert parts.finish("") == ()
    assert not parts.ends_with_call


def test_the_id_of_a_call_follows_from_its_token_and_its_number() -> None:
    two = [
        AnswerPart(PartKind.CALL, "f", 0),
        AnswerPart(PartKind.ARGUMENTS, "{}", 0),
        AnswerPart(PartKind.CALL, "g", 1),
    ]
    parts = ChoiceParts(Scripted(a=[], b=two, c=[AnswerPart(PartKind.CALL, "h", 2)], finish=[]), REQUEST, 1)
    assert parts.push("a", 3) == ()
    assert not parts.ends_with_call
    first, arguments, second = parts.push("b", 1)
    assert first == AnswerPart(PartKind.CALL, "f", 0, call_id(REQUEST, 1, 4))
    assert arguments == two[1]
    assert second.id == call_id(REQUEST, 1, 5)
    assert parts.push("c", 1) == (AnswerPart(PartKind.CALL, "h", 2, call_id(REQUEST, 1, 7)),), "one part that is a call"


def test_a_choice_ends_with_a_call_if_the_last_call_is_complete() -> None:
    first = [AnswerPart(PartKind.CALL, "f", 0), AnswerPart(PartKind.ARGUMENTS, "{}", 0)]
    second, begun = AnswerPart(PartKind.CALL, "g", 1), AnswerPart(PartKind.ARGUMENTS, '{"a"', 1)
    script = {"first": first, "second": [second, begun], "more": [AnswerPart(PartKind.ARGUMENTS, ": 1}", 1)]}
    parts = ChoiceParts(Scripted(**script, finish=[]), REQUEST, 0)
    found = []
    for text in ("first", "second", "more"):
        parts.push(text, 1)
        found.append(parts.ends_with_call)
    assert found == [True, False, True]


def test_reasoning_has_the_tokens_since_the_part_before() -> None:
    thought, said = AnswerPart(PartKind.REASONING, "x"), AnswerPart(PartKind.CONTENT, "y")
    parts = ChoiceParts(Scripted(a=[], b=[thought], c=[said], finish=[]), REQUEST, 0)
    parts.push("a", 1)
    parts.push("", 1)
    parts.push("b", 1)
    assert parts.reasoning_tokens == 3
    parts.push("c", 2)
    parts.push("b", 1)
    assert parts.reasoning_tokens == 4


def test_the_id_of_a_call_depends_on_its_request_choice_and_token_alone() -> None:
    def ids(portions: list[str], request_id: str = "a" * 32, index: int = 0) -> list[str]:
        parts = ChoiceParts(FORMATS["hermes"].parser([Tool("f")]), request_id, index)
        found = [part for text in portions for one in text for part in parts.push(one, 1)] + [*parts.finish("")]
        assert parts.ends_with_call
        return [part.id for part in found if part.kind == PartKind.CALL and part.id]

    whole = ids([CALL])
    assert len(whole) == 1
    assert ids([CALL[:20], CALL[20:]]) == whole
    assert whole[0] not in (*ids([CALL], index=1), *ids([CALL], "b" * 32), *ids(["Yes. " + CALL]))

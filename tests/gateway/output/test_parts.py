import pytest

from quire.gateway.output.parts import AnswerPart, PartKind, PlainText, call_id, complete_calls, is_complete, merged

CONTENT, REASONING, CALL, ARGUMENTS = PartKind


def test_plain_text_is_content() -> None:
    parser = PlainText()
    assert parser.push("some text") == [AnswerPart(PartKind.CONTENT, "some text", -1)]
    assert parser.push("") == []
    assert parser.finish() == []


def test_the_id_of_a_tool_call_tells_request_choice_and_position_apart() -> None:
    ids = {call_id(request, choice, at) for request in ("a", "b") for choice in (0, 1) for at in (1, 2, 11)}
    assert len(ids) == 12
    assert call_id("a", 0, 1) == "call_" + "64992eb62b2101de4c4b69b7"


def test_pieces_of_one_part_are_joined() -> None:
    parts = [
        AnswerPart(REASONING, "think"),
        AnswerPart(REASONING, "ing"),
        AnswerPart(CONTENT, "te"),
        AnswerPart(CONTENT, "xt"),
        AnswerPart(CALL, "add", 0, "call_1"),
        AnswerPart(ARGUMENTS, "{", 0),
        AnswerPart(ARGUMENTS, "}", 0),
        AnswerPart(CALL, "add", 1, "call_2"),
        AnswerPart(CALL, "add", 2, "call_3"),
        AnswerPart(ARGUMENTS, "{}", 2),
    ]
    assert merged(parts) == [
        AnswerPart(REASONING, "thinking"),
        AnswerPart(CONTENT, "text"),
        AnswerPart(CALL, "add", 0, "call_1"),
        AnswerPart(ARGUMENTS, "{}", 0),
        AnswerPart(CALL, "add", 1, "call_2"),
        AnswerPart(CALL, "add", 2, "call_3"),
        AnswerPart(ARGUMENTS, "{}", 2),
    ]
    assert merged([]) == []


@pytest.mark.parametrize("arguments", ["{}", ' {"a": [1, {"b": "}"}]}\n'])
def test_complete_arguments(arguments: str) -> None:
    assert is_complete(arguments)


@pytest.mark.parametrize("arguments", ["", "{", '{"a": "}', '{"a": 1', "[]", "{} {}", "[" * 100_000])
def test_arguments_that_are_no_object_are_not_complete(arguments: str) -> None:
    assert not is_complete(arguments)


@pytest.mark.parametrize("cut", [[], [AnswerPart(ARGUMENTS, '{"a": ', 1)]])
def test_a_call_without_complete_arguments_is_left_out(cut: list[AnswerPart]) -> None:
    whole = [AnswerPart(CONTENT, "text"), AnswerPart(CALL, "add", 0, "call_1"), AnswerPart(ARGUMENTS, "{}", 0)]
    assert complete_calls([*whole, AnswerPart(CALL, "add", 1, "call_2"), *cut]) == whole

"""The client of `quire chat`: figures of an answer, and errors of servers."""

from __future__ import annotations

import pytest

from quire.ops.cli.completions import ChatClient, Interrupted, StreamedAnswer, ToolCall
from quire.shared.command_line import CommandError


def test_the_rate_counts_the_wait_for_the_first_token() -> None:
    assert StreamedAnswer(tokens=20, first_token_s=1.0, total_s=2.0).tokens_per_s == 10
    assert StreamedAnswer(total_s=2.0).tokens_per_s is None


def test_a_server_that_is_not_there_is_named_in_the_error() -> None:
    with pytest.raises(CommandError, match=r"127\.0\.0\.1:9"):
        ChatClient("http://127.0.0.1:9").first_model()


def test_tool_calls_are_collected_from_their_pieces() -> None:
    answer = StreamedAnswer()
    pieces = [
        {"index": 0, "id": "a", "function": {"name": "add", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"x":'}},
        {"index": 0, "function": {"arguments": " 1}"}},
        {"index": 1, "id": "b", "function": {"name": "stop", "arguments": "{}"}},
    ]
    assert [answer.add_call(piece) for piece in pieces] == ["add ", '{"x":', " 1}", "stop {}"]
    assert answer.calls == [ToolCall("a", "add", '{"x": 1}'), ToolCall("b", "stop", "{}")]
    assert answer.calls[1].as_json() == {
        "id": "b",
        "type": "function",
        "function": {"name": "stop", "arguments": "{}"},
    }


@pytest.mark.parametrize("index", [-1, 1, None, "0"])
def test_a_piece_of_no_call_breaks_the_answer_off(index: object) -> None:
    with pytest.raises(Interrupted, match="out of order"):
        StreamedAnswer().add_call({"index": index, "function": {"arguments": "{"}})

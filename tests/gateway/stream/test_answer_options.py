"""The options of an answer survive the way through Redis, and other values are refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.stream.answer_options import AnswerOptions, read_answer_options
from quire.shared.validators import InvalidValue

OPTIONS = AnswerOptions(True, 20, 0, True, True, False, True, True, "fp_abc_1")


@pytest.mark.parametrize("options", [AnswerOptions(), OPTIONS])
def test_options_come_back_as_they_were(options: AnswerOptions) -> None:
    assert read_answer_options("answer", list(options)) == options


@pytest.mark.parametrize("index", range(len(OPTIONS)))
def test_every_option_is_checked(index: int) -> None:
    values: list[Any] = list(OPTIONS)
    values[index] = 21 if type(values[index]) is int else 1
    with pytest.raises(InvalidValue, match=AnswerOptions._fields[index]):
        read_answer_options("answer", values)


@pytest.mark.parametrize("value", [None, [], list(OPTIONS)[1:], [*OPTIONS, 1], {}])
def test_other_shapes_are_refused(value: Any) -> None:
    with pytest.raises(InvalidValue, match="answer"):
        read_answer_options("answer", value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (AnswerOptions(), False),
        (AnswerOptions(logprobs=3), False),
        (AnswerOptions(echo=True), True),
        (AnswerOptions(prompt_logprobs=0), True),
        (AnswerOptions(return_token_ids=True), True),
    ],
)
def test_some_answers_need_the_prompt(options: AnswerOptions, expected: bool) -> None:
    assert options.needs_prompt is expected

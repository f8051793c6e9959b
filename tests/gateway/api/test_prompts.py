"""Prompts have three forms, and an error names the prompt and the parameter."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.prompts import read_prompts
from quire.gateway.errors.api_errors import InvalidRequest


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", [("input", "a")]),
        ([5, 6], [("input", [5, 6])]),
        (["a"], [("input[0]", "a")]),
        ([[5], "b"], [("input[0]", [5]), ("input[1]", "b")]),
    ],
)
def test_each_form_is_read(value: Any, expected: list[tuple[str, Any]]) -> None:
    assert read_prompts(value, 2, 10, "input") == expected


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        (5, "prompt", "must be a string"),
        ("", "prompt", "prompt is empty"),
        ([], "prompt", "prompt is empty"),
        (["a", ""], "prompt[1]", r"prompt\[1\] is empty"),
        (["a"] * 3, "prompt", "prompt has 3 elements; this server allows at most 2"),
        ([10], "prompt[0]", "a token id from 0 to 9, not 10"),
        ([["a"]], "prompt[0][0]", "a token id from 0 to 9"),
        ([None], "prompt[0]", "must be a string or an array of token ids"),
    ],
)
def test_an_error_names_the_prompt(value: Any, param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        read_prompts(value, 2, 10)
    assert caught.value.param == param

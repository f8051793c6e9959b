"""A prompt that is too long loses tokens on one side."""

from __future__ import annotations

import pytest

from quire.gateway.model.prompt_form import PromptForm


@pytest.mark.parametrize(
    ("length", "side", "room", "expected"),
    [
        (None, "left", 2, [1, 2, 3, 4, 5]),
        (3, "left", 2, [3, 4, 5]),
        (3, "right", 2, [1, 2, 3]),
        (5, "left", 2, [1, 2, 3, 4, 5]),
        (9, "right", 2, [1, 2, 3, 4, 5]),
        (-1, "left", 2, [4, 5]),
        (-1, "right", 2, [1, 2]),
        (-1, "left", 7, [1, 2, 3, 4, 5]),
        (-1, "left", 0, []),
        (-1, "left", -3, []),
        (-1, "right", -3, []),
    ],
)
def test_a_longer_prompt_loses_tokens_on_one_side(
    length: int | None, side: str, room: int, expected: list[int]
) -> None:
    form = PromptForm(truncate_prompt_tokens=length, truncation_side=side)
    assert form.truncated([1, 2, 3, 4, 5], room) == expected

"""Reports about prompts: they travel in step items, and other values are refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from quire.shared.messages import Delta, MessageError, PromptReport, StepItem, decode_items
from quire.shared.messages.codec import pack, pack_token_ids
from quire.shared.messages.step_items import VERSION

PROMPT = (5, 70_000, 6)
RECORDS = struct.pack("<fIfI", -1.0, 3, -2.5, 1)


@pytest.mark.parametrize(
    "report",
    [
        PromptReport(16),
        PromptReport(0, pack_token_ids(PROMPT)),
        PromptReport(2, pack_token_ids(PROMPT), RECORDS),
        PromptReport(0, pack_token_ids(PROMPT[:1]), b""),
    ],
)
def test_a_report_survives_the_way(report: PromptReport) -> None:
    item = StepItem("r", 0, (Delta(0, (1,)),), None, report)
    assert list(decode_items(item.encode())) == [item]


def test_a_report_has_the_token_ids_of_the_prompt() -> None:
    assert PromptReport(0, pack_token_ids(PROMPT)).token_ids == PROMPT
    assert PromptReport(0).token_ids == ()


@pytest.mark.parametrize(
    "value",
    [
        [],
        [0, None],
        [-1, None, None],
        [True, None, None],
        ["1", None, None],
        [0, b"", None],
        [0, b"123", None],
        [0, "1234", None],
        [0, None, RECORDS],
        [0, pack_token_ids(PROMPT), RECORDS[:-4]],
        [0, pack_token_ids(PROMPT), struct.pack("<fIfI", 1.0, 3, -2.5, 1)],
        [0, pack_token_ids(PROMPT), "text"],
        {"cached": 1},
    ],
)
def test_other_values_are_refused(value: Any) -> None:
    data = pack([VERSION, "r", 0, [[0, [1], None, None, None, None]], None, value])
    with pytest.raises(MessageError):
        list(decode_items(data))

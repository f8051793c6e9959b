"""Records of prompts are read as they were written; malformed records are refused."""

from __future__ import annotations

import math
import struct

import pytest

from quire.shared.prompt_logprobs import (
    PromptTokenLogprobs,
    check_prompt_records,
    prompt_record_bytes,
    read_prompt_records,
)


def packed(*rows: PromptTokenLogprobs) -> bytes:
    data = b""
    for logprob, rank, top in rows:
        data += struct.pack("<fI", logprob, rank) + b"".join(struct.pack("<If", *one) for one in top)
    return data


def row(logprob: float = -1.5, rank: int = 2, *top: tuple[int, float]) -> PromptTokenLogprobs:
    return PromptTokenLogprobs(logprob, rank, top)


@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_records_are_read_as_they_were_written(top: int, count: int) -> None:
    rows = [row(-at / 4, at + 1, *((7 * at + one, -one / 2) for one in range(top))) for at in range(count)]
    data = packed(*rows)
    assert len(data) == count * prompt_record_bytes(top)
    assert check_prompt_records(data, count) is None
    assert list(read_prompt_records(data, count)) == rows


def test_a_prompt_of_one_token_has_no_records() -> None:
    assert check_prompt_records(b"", 0) is None
    assert list(read_prompt_records(b"", 0)) == []


def test_minus_infinity_is_a_log_probability() -> None:
    assert check_prompt_records(packed(row(-math.inf, 9, (1, -math.inf))), 1) is None


@pytest.mark.parametrize(
    ("data", "count", "fault"),
    [
        (packed(row()), 0, "no records of 0"),
        (b"", 2, "have no records"),
        (packed(row())[:-1], 1, "no records of 1"),
        (packed(row(), row(), row()), 2, "no records of 2"),
        (packed(row(-1, 1, *((1, -1.0) for _ in range(21)))), 1, "no records of 1"),
        (packed(row(0.5)), 1, "over 0"),
        (packed(row(), row(math.nan)), 2, "over 0"),
        (packed(row(-1, 1, (3, 0.25))), 1, "over 0"),
        (packed(row(-1, 1, (3, -1.0), (3, math.nan))), 1, "over 0"),
        (packed(row(-1, 0)), 1, "rank"),
    ],
)
def test_other_bytes_are_refused(data: bytes, count: int, fault: str) -> None:
    assert fault in str(check_prompt_records(data, count))

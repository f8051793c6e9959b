from __future__ import annotations

import math
import struct

import pytest

from quire.shared.logprobs import (
    MAX_TOP_LOGPROBS,
    TokenLogprobs,
    check_records,
    read_records,
    record_bytes,
    record_size,
)

TWO = struct.pack("<fIf", -0.5, 7, -0.25) + struct.pack("<fIf", -2.0, 9, -1.0)


def test_records_are_read_as_they_were_packed() -> None:
    assert read_records(TWO, 2) == [TokenLogprobs(-0.5, ((7, -0.25),)), TokenLogprobs(-2.0, ((9, -1.0),))]
    assert read_records(struct.pack("<2f", -1.0, -2.0), 2) == [TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ())]
    assert read_records(b"", 0) == []


def test_sizes() -> None:
    assert (record_bytes(0), record_bytes(1), record_size(TWO, 2)) == (4, 12, 12)


def test_valid_records_have_no_fault() -> None:
    assert check_records(TWO, 2) is None
    assert check_records(b"", 0) is None
    assert check_records(struct.pack("<fIf", -1.0, 2**32 - 1, -math.inf), 1) is None


@pytest.mark.parametrize(
    ("records", "count", "fault"),
    [
        (TWO, 3, "no records of 3 tokens"),
        (TWO[:-4], 2, "no records of 2 tokens"),
        (b"\0" * (record_bytes(MAX_TOP_LOGPROBS) + 8), 1, "no records"),
        (b"\0", 0, "no records of 0 tokens"),
        (struct.pack("<f", 0.5), 1, "over 0"),
        (struct.pack("<f", math.nan), 1, "over 0, or none"),
        (struct.pack("<fIf", -1.0, 1, math.nan), 1, "over 0, or none"),
    ],
)
def test_faulty_records_are_refused(records: bytes, count: int, fault: str) -> None:
    found = check_records(records, count)
    assert found is not None
    assert fault in found

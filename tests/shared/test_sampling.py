"""Sampling parameters and log-probabilities."""

from __future__ import annotations

import math
import struct
from dataclasses import fields
from typing import Any

import msgpack
import pytest

from quire.shared.config.validators import InvalidValue
from quire.shared.protocol.logprobs import (
    MAX_TOP_LOGPROBS,
    PromptTokenLogprobs,
    TokenLogprobs,
    check_prompt_records,
    check_records,
    prompt_record_bytes,
    read_prompt_records,
    read_records,
    record_bytes,
)
from quire.shared.protocol.sampling_params import PARAMETERS, SamplingParams

# --- sampling params --------------------------------------------------------------------------------------------------
# The table of sampling parameters: what clients send becomes the final form, which a message carries.


# By parameter: values as clients send them, with their final form.
GIVEN: list[tuple[str, Any, Any]] = [
    ("top_k", -1, 0),
    ("top_k", 5, 5),
    ("seed", -1, 2**64 - 1),
    ("seed", 7, 7),
    ("stop", "END", ("END",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop_token_ids", [5, 6], (5, 6)),
    ("early_stopping", False, "false"),
    ("early_stopping", "never", "never"),
    ("logit_bias", {"5": -1, "7": 0.5}, ((5, -1.0), (7, 0.5))),
    ("temperature", 1, 1.0),
]


@pytest.mark.parametrize(("name", "value", "final"), GIVEN)
def test_the_final_form_is_one_that_a_message_carries(name: str, value: Any, final: Any) -> None:
    assert PARAMETERS[name].read(name, value) == final
    [field] = [one for one in fields(SamplingParams) if one.name == name]
    decoded = msgpack.unpackb(msgpack.packb(final))
    assert field.metadata["check"](name, decoded) == final


@pytest.mark.parametrize("name", ["a logit bias", "a number", "too many"])
def test_a_wrong_bias_is_named(name: str) -> None:
    value: Any = {"a logit bias": {"x": 1}, "a number": {"5": "1"}, "too many": {str(one): 1 for one in range(1025)}}
    with pytest.raises(InvalidValue, match=r"^logit_bias"):
        PARAMETERS["logit_bias"].read("logit_bias", value[name])


def test_a_beam_search_takes_values_in_range() -> None:
    for name, one in PARAMETERS.items():
        if one.beam_value is not None:
            assert one.read(name, one.beam_value) == one.beam_value


# --- logprobs ---------------------------------------------------------------------------------------------------------


TWO = struct.pack("<fIf", -0.5, 7, -0.25) + struct.pack("<fIf", -2.0, 9, -1.0)


def test_records_are_read_as_they_were_packed() -> None:
    assert read_records(TWO, 2) == [TokenLogprobs(-0.5, ((7, -0.25),)), TokenLogprobs(-2.0, ((9, -1.0),))]
    assert read_records(struct.pack("<2f", -1.0, -2.0), 2) == [TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ())]
    assert read_records(b"", 0) == []


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


# --- prompt logprobs --------------------------------------------------------------------------------------------------
# Records of prompts are read as they were written; malformed records are refused.


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

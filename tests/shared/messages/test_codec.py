"""Bytes that are no message are refused, at no cost."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.shared.messages import (
    VERSION,
    GenerationRequest,
    MessageError,
    SamplingParams,
    WorkerCard,
    decode_items,
)

REQUEST = GenerationRequest("r", "m", (1, 2), SamplingParams(max_tokens=3, stop=("x",)))


@given(st.binary(max_size=200))
def test_whatever_the_bytes_are_only_a_message_error_comes_out(data: bytes) -> None:
    for decode in (GenerationRequest.decode, WorkerCard.decode, lambda frame: list(decode_items(frame))):
        with contextlib.suppress(MessageError):
            decode(data)


def _map(message: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = msgpack.unpackb(message.encode())
    return decoded


def test_unknown_fields_and_other_versions_are_refused() -> None:
    with pytest.raises(MessageError, match="surprise"):
        GenerationRequest.decode(msgpack.packb({**_map(REQUEST), "surprise": 1}))
    with pytest.raises(MessageError, match="version"):
        GenerationRequest.decode(msgpack.packb({**_map(REQUEST), "version": VERSION + 1}))
    with pytest.raises(MessageError, match="version"):
        list(decode_items(msgpack.packb([VERSION + 1, "r", 0, [], None])))


@pytest.mark.parametrize(
    "data",
    [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc1"],
    ids=["nested deeply", "array of 4 G", "4 GB of bytes", "map of 4 G", "not msgpack"],
)
def test_forged_sizes_and_depths_cost_nothing(data: bytes) -> None:
    with pytest.raises(MessageError):
        GenerationRequest.decode(data)
    with pytest.raises(MessageError):
        list(decode_items(data))

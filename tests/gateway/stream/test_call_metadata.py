"""Call metadata survives its message; everything else is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.messages import MessageError

ABOUT = CallMetadata("chat", 1_700_000_000, 3, True, ("x", "stop😀"), 17, 1, True)
LABELS = {f"{n:02}" + "😀" * 62: "😀" * 512 for n in range(16)}


def test_what_is_noted_about_a_call_survives_the_way() -> None:
    assert CallMetadata.decode(ABOUT.encode()) == ABOUT


def test_whether_the_stop_string_is_text_survives_the_way() -> None:
    metadata = replace(ABOUT, include_stop_str_in_output=True)
    assert CallMetadata.decode(metadata.encode()) == metadata != ABOUT


def test_the_largest_labels_survive_the_way() -> None:
    metadata = replace(
        ABOUT,
        stop=("😀" * 1024,) * 16,
        metadata=tuple(LABELS.items()),
        service_tier="flex",
        prompt_cache_key="😀" * 512,
    )
    assert CallMetadata.decode(metadata.encode()) == metadata


@given(st.binary(max_size=64))
def test_bytes_that_are_no_note_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        CallMetadata.decode(data)


@pytest.mark.parametrize("position", range(13))
@pytest.mark.parametrize("value", [None, -1, "x" * 2000, b"x", 1.5, [1], ["x"] * 17, [["a", 1]], {}, 2**63])
def test_no_field_of_a_note_takes_anything(position: int, value: Any) -> None:
    fields = msgpack.unpackb(ABOUT.encode())
    fields[position] = value
    with pytest.raises(MessageError):
        CallMetadata.decode(msgpack.packb(fields, use_bin_type=True))

"""Decoding accepts every encoded step item, and nothing else."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.shared.messages import (
    OUTCOMES,
    VERSION,
    Delta,
    MessageError,
    Outcome,
    PromptReport,
    StepItem,
    decode_items,
)

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
logprobs = st.floats(max_value=0, allow_nan=False, width=32)


@st.composite
def records(draw: st.DrawFn, count: int) -> bytes:
    """Draw the log-probability records of `count` tokens."""
    top = draw(st.integers(0, 20))
    one = st.tuples(logprobs, *[st.integers(0, 2**31 - 1), logprobs] * top)
    return b"".join(struct.pack("<f" + "If" * top, *draw(one)) for _ in range(count))


plain_deltas = st.builds(
    Delta,
    choice=st.integers(0, 127),
    token_ids=token_ids,
    finish_reason=st.none() | st.sampled_from(["stop", "length"]),
    matched_stop=st.none() | st.text(max_size=10),
    score=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    logprobs=st.none(),
)


@st.composite
def scored_deltas(draw: st.DrawFn) -> Delta:
    delta = draw(plain_deltas)
    return delta._replace(logprobs=draw(records(len(delta.token_ids))))


@st.composite
def reports(draw: st.DrawFn) -> PromptReport:
    """Draw a report of a prompt of up to three tokens, with or without the prompt and its log-probabilities."""
    ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=2))
    top = draw(st.integers(0, 2))
    one = st.tuples(logprobs, st.integers(1, 2**31), *[st.integers(0, 2**31 - 1), logprobs] * top)
    data = b"".join(struct.pack("<fI" + "If" * top, *draw(one)) for _ in ids[1:])
    prompt = draw(st.none() | st.just(struct.pack(f"<{len(ids)}I", *ids)))
    return PromptReport(draw(st.integers(0, 2_000_000)), prompt, draw(st.none() | st.just(data)) if prompt else None)


deltas = plain_deltas | scored_deltas()
items = st.builds(
    StepItem,
    request_id=st.text(max_size=40),
    start=st.integers(0, 10**6),
    deltas=st.lists(deltas, max_size=4).map(tuple),
    outcome=st.none()
    | st.builds(
        Outcome,
        st.sampled_from(OUTCOMES),
        st.text(max_size=50),
        st.none() | st.integers(1, 20).map(lambda size: bytes(range(4 * size))),
    ),
    report=st.none() | reports(),
)


@given(st.lists(items, max_size=5))
def test_a_frame_of_items_comes_back_as_it_was(sent: list[StepItem]) -> None:
    assert list(decode_items(b"".join(item.encode() for item in sent))) == sent


@given(items, st.data())
def test_a_frame_that_was_cut_is_refused(item: StepItem, data: st.DataObject) -> None:
    frame = item.encode()
    length = data.draw(st.integers(1, len(frame) - 1))
    with pytest.raises(MessageError):
        list(decode_items(frame[:length]))


@pytest.mark.parametrize(
    "value",
    [
        msgpack.ExtType(5, b"x"),
        msgpack.Timestamp(1, 1),
        {1: 2},
        [VERSION, "r", 0, [], None, 1],
        *(
            [VERSION, "r", 0, [delta], None]
            for delta in (
                [0, [msgpack.ExtType(5, b"x")], None, None, None, None],
                [0, [1.0], None, None, None, None],
                [128, [1], None, None, None, None],
                [0, [-1], None, None, None, None],
                [0, [1], None, None, None],
                [0, [1], None, None, None, None, None],
                [0, [1], None, None, float("nan"), None],
                [0, [1], None, None, float("-inf"), None],
                [0, [1], None, None, True, None],
                [0, [1], None, None, "1", None],
                # Wrong log-probabilities: not bytes; no record; half a record; records for another number of tokens;
                # 21 alternatives; above 0; NaN or infinite.
                [0, [1], None, None, None, "abcd"],
                [0, [1], None, None, None, [-1.0]],
                [0, [1], None, None, None, b""],
                [0, [1], None, None, None, bytes(3)],
                [0, [1], None, None, None, bytes(8)],
                [0, [1, 2], None, None, None, bytes(12)],
                [0, [], None, None, None, bytes(4)],
                [0, [1], None, None, None, bytes(4 + 8 * 21)],
                [0, [1], None, None, None, struct.pack("<f", 0.5)],
                [0, [1], None, None, None, struct.pack("<f", float("nan"))],
                [0, [1], None, None, None, struct.pack("<fIf", -1, 5, float("nan"))],
                [0, [1], None, None, None, struct.pack("<fIfIf", -1, 5, float("nan"), 6, -1)],
                [0, [1], None, None, None, struct.pack("<fIfIf", -1, 5, float("inf"), 6, float("-inf"))],
                [0, [1, 2], None, None, None, struct.pack("<fIffIf", -1, 5, -1, -1, 5, 0.5)],
            )
        ),
        [VERSION, "r", 0, [], ["abandoned", ""]],
        [VERSION, b"r", 0, [], None],
        [VERSION, "r", True, [], None],
    ],
)
def test_items_of_another_shape_are_refused(value: Any) -> None:
    with pytest.raises(MessageError):
        list(decode_items(msgpack.packb(value)))


def test_the_end_of_an_item_counts_the_tokens_of_all_choices() -> None:
    item = StepItem("r", 10, (Delta(0, (1, 2)), Delta(1, ()), Delta(2, (3,), "stop")))
    assert item.end == 13


def test_a_score_may_be_any_finite_number() -> None:
    for sent, score in ((-1.5, -1.5), (-3, -3.0), (0, 0.0), (1e308, 1e308)):
        (item,) = decode_items(msgpack.packb([VERSION, "r", 0, [[0, [1], "stop", None, sent, None]], ["stop", ""]]))
        assert item.deltas == (Delta(0, (1,), "stop", None, score),)
        assert type(item.deltas[0].score) is float


def test_log_probabilities_are_cut_with_their_tokens() -> None:
    one = [struct.pack("<fIf", -at, at, -at) for at in range(4)]
    delta = Delta(3, (5, 6, 7, 8), "stop", "END", None, b"".join(one))
    for count in range(1, 4):
        assert delta.first(count) == Delta(3, (5, 6, 7, 8)[:count], None, None, None, b"".join(one[:count]))
        assert delta.without_first(count) == Delta(3, (5, 6, 7, 8)[count:], "stop", "END", None, b"".join(one[count:]))
    assert delta.without_first(4) == Delta(3, (), "stop", "END", None, b"")
    [item] = decode_items(StepItem("r", 4, (delta.without_first(4),)).encode())
    assert item.deltas == (delta.without_first(4),)


@pytest.mark.parametrize("embedding", [b"", b"12345", "text", 5, [1.0], bytes(4 * 65536 + 4)])
def test_a_wrong_embedding_is_refused(embedding: Any) -> None:
    data = msgpack.packb([VERSION, "r", 0, [], ["stop", "", embedding]])
    with pytest.raises(MessageError, match="embedding"):
        list(decode_items(data))


def test_an_outcome_may_leave_out_the_embedding() -> None:
    """The scripts in Redis write outcomes of two values."""
    for outcome in (["stop", ""], ["stop", "", None]):
        [item] = decode_items(msgpack.packb([VERSION, "r", 0, [], outcome]))
        assert item.outcome == Outcome("stop")
    with pytest.raises(MessageError, match="outcome"):
        list(decode_items(msgpack.packb([VERSION, "r", 0, [], ["stop", "", None, None]])))

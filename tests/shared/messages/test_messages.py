"""Messages of the queue come back as they were, and damaged ones are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.shared.protocol.broker.commit import PackedStep, StepCommit
from quire.shared.protocol.messages import (
    OUTCOMES,
    POOLINGS,
    VERSION,
    CacheBreakpoint,
    Delta,
    GenerationRequest,
    ImageRef,
    MessageError,
    Outcome,
    PredictionCounts,
    PromptReport,
    SamplingParams,
    StepItem,
    WorkerCard,
    decode_items,
)
from quire.shared.protocol.messages.codec import VERSION as MANIFEST_VERSION
from quire.shared.protocol.messages.codec import pack, pack_token_ids
from quire.shared.protocol.messages.manifest import FILE_LIMITS, FileEntry, ModelManifest
from quire.shared.protocol.messages.step_items import VERSION as REPORT_VERSION
from quire.shared.protocol.sampling_params import (
    EARLY_STOPPING,
    MAX_ALLOWED_TOKENS,
    MAX_GRAMMAR_LENGTH,
    MAX_MARKER_TOKENS,
)

# --- codec ------------------------------------------------------------------------------------------------------------
# Bytes that are no message are refused, at no cost.


REQUEST = GenerationRequest("r", "m", (1, 2), SamplingParams(max_tokens=3, stop=("x",)))
FORK = dataclasses.replace(REQUEST, forked_from="o", num_kept=1, first_choice=2)
OF_FORKS = ("forked_from", "num_kept", "first_choice")
OPTIONAL = ("prediction", "images", "breakpoints", "pinned_for", "score_tokens", *OF_FORKS)


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


# --- requests ---------------------------------------------------------------------------------------------------------
# Decoding accepts every encoded request and worker card, and nothing else.


requests = st.builds(
    GenerationRequest,
    id=st.text(min_size=1, max_size=40),
    model=st.text(max_size=40),
    prompt=st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple),
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.integers(0, 2_000_000),
        seed=st.integers(0, 2**64 - 1),
        logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 100)), max_size=4).map(tuple),
        grammar=st.text(max_size=40),
        n=st.integers(1, 128),
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1),
        stop=st.lists(st.text(min_size=1, max_size=5), max_size=16).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=80).map(tuple),
        ignore_eos=st.booleans(),
        include_stop_str_in_output=st.booleans(),
        bad_words=st.lists(st.text("ab ", min_size=1, max_size=5).filter(str.strip), max_size=64).map(tuple),
        allowed_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=80).map(tuple),
        prompt_logprobs=st.integers(-1, 20),
        returns_prompt=st.booleans(),
        skip_special_tokens=st.booleans(),
        best_of=st.integers(0, 128),
        beam_width=st.integers(0, 128),
        length_penalty=st.floats(-10, 10),
        early_stopping=st.sampled_from(EARLY_STOPPING),
        logprobs=st.booleans(),
        top_logprobs=st.integers(0, 20),
    ),
    cache_salt=st.text(max_size=256),
    pooling=st.sampled_from(["", *POOLINGS]),
    prediction=st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple),
)
CARD = WorkerCard("w", "1", "m", 100, 64, 50, (2,), 16, 10, 5, 0, 0, 7)


@given(requests)
def test_a_request_comes_back_as_it_was(request: GenerationRequest) -> None:
    assert GenerationRequest.decode(request.encode()) == request


def test_a_fork_comes_back_as_it_was_and_other_requests_have_none_of_its_fields() -> None:
    assert GenerationRequest.decode(FORK.encode()) == FORK
    assert _map(FORK).keys() - _map(REQUEST).keys() == {*OF_FORKS}
    for name in OF_FORKS:
        with pytest.raises(MessageError, match=name):
            GenerationRequest.decode(msgpack.packb({**_map(FORK), name: 1.5}))


@pytest.mark.parametrize(
    "images",
    [
        1.5,
        [["0" * 64, 0]],
        [["0" * 63, 0, 1]],
        [["0" * 63 + "g", 0, 1]],
        [["0" * 64, -1, 1]],
        [["0" * 64, 0, 0]],
        [["0" * 64, 0, 3], ["1" * 64, 2, 1]],
    ],
)
def test_images_of_a_request_have_digests_and_do_not_overlap(images: Any) -> None:
    seeing = replace(REQUEST, images=(ImageRef("0" * 64, 0, 2), ImageRef("1" * 64, 2, 1), ImageRef("0" * 64, 9, 1)))
    assert GenerationRequest.decode(seeing.encode()) == seeing
    assert seeing.digests == ("0" * 64, "1" * 64)
    with pytest.raises(MessageError, match="images"):
        GenerationRequest.decode(msgpack.packb({**_map(REQUEST), "images": images}))


@pytest.mark.parametrize(
    "breakpoints", [8, [[8]], [[0, 300]], [[-1, 300]], [[8, 0]], [[8, 3601]], [["8", 300]], [[8, 300]] * 5]
)
def test_breakpoints_of_a_request_have_a_place_and_a_time(breakpoints: Any) -> None:
    pinning = replace(REQUEST, breakpoints=(CacheBreakpoint(8, 3600), CacheBreakpoint(16, 300)), pinned_for="k")
    assert GenerationRequest.decode(pinning.encode()) == pinning
    with pytest.raises(MessageError, match="breakpoints"):
        GenerationRequest.decode(msgpack.packb({**_map(REQUEST), "breakpoints": breakpoints}))


def test_a_worker_card_comes_back_as_it_was() -> None:
    assert WorkerCard.decode(CARD.encode()) == CARD


@pytest.mark.parametrize(
    "name",
    sorted({field.name for field in dataclasses.fields(GenerationRequest)} - set(OPTIONAL)),
)
def test_every_field_of_a_request_is_required_and_typed(name: str) -> None:
    missing = _map(REQUEST)
    del missing[name]
    wrong = {**_map(REQUEST), name: 1.5}
    for broken in (missing, wrong):
        with pytest.raises(MessageError, match=name):
            GenerationRequest.decode(msgpack.packb(broken))


def test_a_request_without_a_prediction_has_no_field_for_it() -> None:
    """Records of workers and gateways that know no predictions are the same bytes."""
    assert "prediction" not in _map(REQUEST)
    assert GenerationRequest.decode(msgpack.packb(_map(REQUEST))).prediction == ()
    predicted = dataclasses.replace(REQUEST, prediction=(7, 8, 9))
    assert _map(predicted) == {**_map(REQUEST), "prediction": pack_token_ids((7, 8, 9))}
    assert predicted.cost == REQUEST.cost


@pytest.mark.parametrize("value", [None, 1.5, "1234", [1], b"123", bytes(4 * 2_000_001)])
def test_a_wrong_prediction_is_refused(value: Any) -> None:
    with pytest.raises(MessageError, match="prediction must be packed"):
        GenerationRequest.decode(msgpack.packb({**_map(REQUEST), "prediction": value}))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
@pytest.mark.parametrize("value", [None, "x", -(10**9), b"x", [1], {}])
def test_every_sampling_parameter_is_checked(name: str, value: Any) -> None:
    broken = _map(REQUEST)
    # "x" is a valid grammar, and [1] is a valid list of token ids: these get values that are too long.
    wrong = {
        ("grammar", "x"): "x" * (MAX_GRAMMAR_LENGTH + 1),
        ("stop_token_ids", "[1]"): [1] * 81,
        ("allowed_token_ids", "[1]"): [1] * (MAX_ALLOWED_TOKENS + 1),
        ("thinking_start", "[1]"): [1] * (MAX_MARKER_TOKENS + 1),
        ("thinking_end", "[1]"): [1] * (MAX_MARKER_TOKENS + 1),
    }
    broken["sampling"][name] = wrong.get((name, str(value)), value)
    with pytest.raises(MessageError, match=name):
        GenerationRequest.decode(msgpack.packb(broken))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", True),
        ("ignore_eos", 1),
        ("temperature", float("nan")),
        ("top_p", float("inf")),
        ("n", 2.0),
        ("best_of", 2.0),
        ("best_of", 129),
        ("beam_width", True),
        ("beam_width", 129),
        ("length_penalty", 10.5),
        ("length_penalty", float("nan")),
        ("early_stopping", True),
        ("early_stopping", "Never"),
    ],
)
def test_python_is_more_lenient_than_the_protocol(name: str, value: Any) -> None:
    broken = _map(REQUEST)
    broken["sampling"][name] = value
    with pytest.raises(MessageError, match=name):
        GenerationRequest.decode(msgpack.packb(broken))


def test_a_salt_has_at_most_256_characters() -> None:
    salted = dataclasses.replace(REQUEST, cache_salt="ä" * 256)
    assert GenerationRequest.decode(salted.encode()) == salted
    for salt in ("x" * 257, b"x", None, 1):
        with pytest.raises(MessageError, match="cache_salt"):
            GenerationRequest.decode(msgpack.packb({**_map(REQUEST), "cache_salt": salt}))


@pytest.mark.parametrize(
    ("params", "sequences", "streamed"),
    [
        ({}, 1, True),
        ({"n": 3}, 3, True),
        ({"n": 3, "best_of": 3}, 3, True),
        ({"n": 1, "best_of": 3}, 3, False),
        ({"n": 2, "beam_width": 4}, 4, False),
        ({"n": 4, "beam_width": 4}, 4, False),
    ],
)
def test_what_runs_at_once_is_what_admission_counts(params: dict[str, int], sequences: int, streamed: bool) -> None:
    sampling = SamplingParams(max_tokens=10, **params)  # type: ignore[arg-type]
    assert (sampling.num_sequences, sampling.is_streamed) == (sequences, streamed)
    assert GenerationRequest("r", "m", (1, 2), sampling).cost == 2 + 10 * sequences


@pytest.mark.parametrize("number", [0, 65537, True, 1.0])
def test_a_card_says_how_many_sequences_run_at_once(number: Any) -> None:
    with pytest.raises(MessageError, match="max_num_seqs"):
        WorkerCard.decode(msgpack.packb({**_map(CARD), "max_num_seqs": number}))


def test_an_embedding_costs_its_prompt() -> None:
    assert REQUEST.cost == 2 + 3
    assert dataclasses.replace(REQUEST, pooling="mean").cost == 2
    with pytest.raises(MessageError, match="pooling"):
        GenerationRequest.decode(dataclasses.replace(REQUEST, pooling="max").encode())


# --- step items -------------------------------------------------------------------------------------------------------
# Decoding accepts every encoded step item, and nothing else.


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
        st.none() | st.builds(PredictionCounts, st.integers(0, 2**53), st.integers(0, 2**53)),
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
    for outcome in (["stop", ""], ["stop", "", None], ["stop", "", None, None]):
        [item] = decode_items(msgpack.packb([VERSION, "r", 0, [], outcome]))
        assert item.outcome == Outcome("stop")
    with pytest.raises(MessageError, match="outcome"):
        list(decode_items(msgpack.packb([VERSION, "r", 0, [], ["stop", "", None, None, True, None]])))


@pytest.mark.parametrize(
    ("outcome", "values"),
    [
        (Outcome("stop"), ["stop", ""]),
        (Outcome("stop", "why"), ["stop", "why"]),
        (Outcome("stop", "", b"1234"), ["stop", "", b"1234"]),
        (Outcome("stop", prediction=PredictionCounts(0, 7)), ["stop", "", None, [0, 7]]),
        (Outcome("stop", is_exact=False), ["stop", "", None, None, False]),
    ],
)
def test_an_outcome_has_no_more_values_than_it_needs(outcome: Outcome, values: list[Any]) -> None:
    item = StepItem("r", 0, (), outcome)
    assert msgpack.unpackb(item.encode()) == [VERSION, "r", 0, [], values]
    assert list(decode_items(item.encode())) == [item]
    assert PackedStep([StepCommit("a", item)]).items == [item.encode()]


@pytest.mark.parametrize("counts", [7, [], [1], [1, 2, 3], [1, -2], [1, 2.0], [True, 2], [1, 2**53 + 1]])
def test_wrong_counts_of_a_prediction_are_refused(counts: Any) -> None:
    with pytest.raises(MessageError, match=r"prediction|accepted|rejected"):
        list(decode_items(msgpack.packb([VERSION, "r", 0, [], ["stop", "", None, counts]])))


@pytest.mark.parametrize("is_exact", [None, 0, "false"])
def test_an_outcome_is_exact_or_not(is_exact: Any) -> None:
    with pytest.raises(MessageError, match="exact"):
        list(decode_items(msgpack.packb([VERSION, "r", 0, [], ["stop", "", None, None, is_exact]])))


# --- manifest ---------------------------------------------------------------------------------------------------------
# Manifests are read strictly: names of files are a fixed list, sizes have limits.


GOOD: dict[str, Any] = {
    "model": "m",
    "aliases": ["a"],
    "files": [["config.json", "0" * 64, 2]],
    "version": MANIFEST_VERSION,
}


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = ModelManifest("m", ("a",), (FileEntry.of("config.json", b"{}"),))
    assert ModelManifest.decode(manifest.encode()) == manifest
    assert ModelManifest.decode(pack(GOOD)).files == (FileEntry("config.json", "0" * 64, 2),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "a b"),
        ("model", 5),
        ("aliases", ["x"] * 17),
        ("aliases", ["{m}"]),
        ("files", [["model.py", "0" * 64, 2]]),
        ("files", [["../config.json", "0" * 64, 2]]),
        ("files", [["config.json", "0" * 63, 2]]),
        ("files", [["config.json", "0" * 64, FILE_LIMITS["config.json"] + 1]]),
        ("files", [["config.json", "0" * 64, True]]),
        ("files", [["config.json", "0" * 64, 2]] * 2),
        ("files", [["config.json", "0" * 64]]),
        ("version", MANIFEST_VERSION + 1),
        ("code", "import os"),
    ],
)
def test_everything_else_is_refused(field: str, value: Any) -> None:
    with pytest.raises(MessageError, match=field if field in GOOD else "unknown"):
        ModelManifest.decode(pack(GOOD | {field: value}))


# --- prompt report ----------------------------------------------------------------------------------------------------
# Reports about prompts: they travel in step items, and other values are refused.


PROMPT = (5, 70_000, 6)
RECORDS = struct.pack("<fIfI", -1.0, 3, -2.5, 1)


@pytest.mark.parametrize(
    "report",
    [
        PromptReport(16),
        PromptReport(0, pack_token_ids(PROMPT)),
        PromptReport(2, pack_token_ids(PROMPT), RECORDS),
        PromptReport(0, pack_token_ids(PROMPT[:1]), b""),
        PromptReport(2, None, None, (16, 0)),
        PromptReport(0, None, None, (8, 16)),
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
        [0, None, None, None],
        [0, None, None, [1]],
        [0, None, None, [1, -1]],
        [0, None, None, [1, 1], 1],
        [0, pack_token_ids(PROMPT), RECORDS[:-4]],
        [0, pack_token_ids(PROMPT), struct.pack("<fIfI", 1.0, 3, -2.5, 1)],
        [0, pack_token_ids(PROMPT), "text"],
        {"cached": 1},
    ],
)
def test_other_values_are_refused(value: Any) -> None:
    data = pack([REPORT_VERSION, "r", 0, [[0, [1], None, None, None, None]], None, value])
    with pytest.raises(MessageError):
        list(decode_items(data))

"""From tokens to the texts of an answer."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire.gateway.errors import api_errors
from quire.gateway.model.served_model import ServedModel, load_model
from quire.gateway.model.token_texts import TokenTexts
from quire.gateway.output.parts import AnswerPart, PartKind, call_id
from quire.gateway.output.tools import Tool
from quire.gateway.stream.call_metadata import MAX_ADAPTER_NAME, CallMetadata
from quire.gateway.stream.choice_parts import ChoiceParts
from quire.gateway.stream.choice_text import ChoiceText
from quire.gateway.stream.output_spec import OutputSpec
from quire.gateway.stream.prompt_text import PromptText
from quire.gateway.stream.transcript import TextDelta, Transcript
from quire.shared.protocol.logprobs import PromptTokenLogprobs
from quire.shared.protocol.messages import Delta, MessageError, Outcome, PromptReport, StepItem
from quire.shared.protocol.messages.codec import pack_token_ids
from quire.shared.text.detokenizer import drops_first_space
from tests.support.gateway.running import MODEL, tokens, write_model
from tests.support.tokenizers import byte_fallback, byte_level

# --- A transcript is the text of a call: choices and tokens are counted over its requests, and a failure ends ---------


COMPLETION = CallMetadata("completion", 0, 1, True, (), 3, 1, False)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load_model(str(model_folder), MODEL)


def item(request_id: str, start: int, text: str, choice: int = 0, reason: str | None = None) -> StepItem:
    outcome = Outcome(reason) if reason else None
    return StepItem(request_id, start, (Delta(choice, tuple(tokens(text)), reason),), outcome)


def test_choices_and_positions_are_those_of_the_call(model: ServedModel) -> None:
    """The second request's choice follows those of the first, and its tokens are counted with them."""
    transcript = Transcript(replace(COMPLETION, n=2, requests=2), model, ["a", "b"])
    assert transcript.feed(item("a", 0, "abc", choice=1)) == [TextDelta(1, "abc", "", None, 3)]
    assert transcript.feed(item("b", 0, "de")) == [TextDelta(2, "de", "", None, 5)]
    assert transcript.feed(item("a", 3, "f")) == [TextDelta(0, "f", "", None, 6)]
    assert transcript.usage == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert not transcript.ended


def test_the_end_of_a_request_ends_its_choices_and_that_of_all_the_call(model: ServedModel) -> None:
    transcript = Transcript(replace(COMPLETION, requests=2), model, ["a", "b"])
    assert transcript.feed(item("a", 0, "x", reason="stop")) == [TextDelta(0, "x", "", "stop", 1)]
    assert not transcript.ended
    # A choice without a finish reason of its own gets that of the request.
    assert transcript.feed(StepItem("b", 0, (), Outcome("length"))) == [TextDelta(1, "", "", "length", 1)]
    assert transcript.ended
    assert transcript.finish_reasons == ["stop", "length"]
    assert transcript.error is None


def test_what_belongs_to_no_open_choice_adds_nothing_and_hides_nothing(model: ServedModel) -> None:
    transcript = Transcript(replace(COMPLETION, n=2), model, ["a"])
    transcript.feed(StepItem("a", 0, (Delta(0, tuple(tokens("x")), "stop"),)))
    ids = tuple(tokens("y"))
    found = transcript.feed(StepItem("a", 1, (Delta(0, ids), Delta(2, ids), Delta(1, ids))))
    assert found == [TextDelta(1, "y", "", None, 4)]
    assert transcript.feed(StepItem("a", 4, (), Outcome("length"))) == [TextDelta(1, "", "", "length", 4)]
    assert transcript.finish_reasons == ["stop", "length"]


@pytest.mark.parametrize("keeps_ids", [False, True])
def test_parts_depend_on_the_tokens_and_not_on_how_they_come(model: ServedModel, keeps_ids: bool) -> None:
    """Of two requests with two choices each, whose calls all have ids of their own."""
    spec = OutputSpec(tool_format="hermes", tools=(Tool("f"),))
    metadata = replace(COMPLETION, dialect="chat", n=2, requests=2, output_spec=spec.encode())
    metadata = replace(metadata, return_token_ids=keeps_ids)
    ids = tuple(tokens("Yes. " + CALL))
    found: list[list[TextDelta]] = []
    for size in (1, 3, len(ids)):
        transcript = Transcript(metadata, model, ["a", "b"])
        deltas: list[TextDelta] = []
        for number in range(4):
            name, choice = "ab"[number // 2], number % 2
            for at in range(0, len(ids), size):
                reason = "stop" if at + size >= len(ids) else None
                outcome = Outcome("stop") if reason and choice else None
                delta = Delta(choice, ids[at : at + size], reason)
                deltas += transcript.feed(StepItem(name, choice * len(ids) + at, (delta,), outcome))
        assert transcript.ended
        assert transcript.finish_reasons == ["tool_calls"] * 4
        found.append(deltas)
    assert found[0] == found[1] == found[2]
    assert [delta.position for delta in found[0]] == sorted(delta.position for delta in found[0])
    calls = [part.id for delta in found[0] for part in delta.parts or () if part.kind == PartKind.CALL]
    assert len(set(calls)) == 4
    assert [delta.choice for delta in found[0] if delta.finish_reason] == [0, 1, 2, 3]
    scored = [delta.logprobs for delta in found[0] if delta.logprobs is not None]
    assert tuple(one for part in scored for one in part.token_ids) == (4 * ids if keeps_ids else ())


def test_a_choice_with_parts_that_ends_with_its_request_ends_with_what_was_held_back(model: ServedModel) -> None:
    spec = OutputSpec(tool_format="hermes", tools=(Tool("f"),))
    transcript = Transcript(replace(COMPLETION, dialect="chat", output_spec=spec.encode()), model, ["a"])
    ids = tuple(tokens("Yes <tool"))
    deltas = transcript.feed(StepItem("a", 0, (Delta(0, ids),)))
    deltas += transcript.feed(StepItem("a", len(ids), (), Outcome("length")))
    assert "".join(part.text for delta in deltas for part in (*(delta.parts or ()), *delta.rest_parts)) == "Yes <tool"
    assert (deltas[-1].finish_reason, deltas[-1].position) == ("length", len(ids))


@pytest.mark.parametrize(("dialect", "text"), [("completion", " the cat"), ("chat", "the cat")])
def test_the_first_space_of_a_tokenizer_that_drops_it_stays_in_a_continuation(
    tmp_path: Path, dialect: str, text: str
) -> None:
    model = load_model(str(write_model(tmp_path / "model", byte_fallback())), MODEL)
    ids = tuple(model.tokenizer.encode("the cat", add_special_tokens=False).ids)
    metadata = replace(COMPLETION, dialect=dialect, echoes_prompt=True, logprobs=0)
    transcript = Transcript(metadata, model, ["a"])
    report = PromptReport(2, pack_token_ids(ids), None)
    records = b"".join(struct.pack("<f", -1.0) for _ in ids)
    [delta] = transcript.feed(StepItem("a", 0, (Delta(0, ids, "length", logprobs=records),), report=report))
    assert delta.text + delta.rest == text
    _, prompt = transcript.prompt_of("a")
    assert prompt is not None
    assert prompt.text == "the cat"
    # A token begins where it does in the text of the prompt and the answer.
    assert prompt.offsets == prompt_text("byte fallback", list(ids)).offsets
    assert delta.logprobs is not None
    assert delta.logprobs.offsets[0] == len(prompt.text)
    assert transcript.usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_text_that_may_become_a_stop_string_is_held_back(model: ServedModel) -> None:
    transcript = Transcript(replace(COMPLETION, stop=("<end>",)), model, ["a"])
    assert transcript.feed(item("a", 0, "one <e")) == [TextDelta(0, "one ", "", None, 6)]
    [delta] = transcript.feed(StepItem("a", 6, (Delta(0, tuple(tokens("x")), "length"),), Outcome("length")))
    assert (delta.text + delta.rest, delta.finish_reason) == ("<ex", "length")


@pytest.mark.parametrize(
    ("outcome", "error", "status", "code"),
    [
        ("cancelled", api_errors.Cancelled, 499, "cancelled"),
        ("deadline", api_errors.DeadlinePassed, 504, "deadline_exceeded"),
        ("error", api_errors.GenerationFailed, 500, "generation_failed"),
        ("quarantined", api_errors.GenerationFailed, 500, "quarantined"),
    ],
)
def test_a_failure_ends_the_call_with_its_error(
    model: ServedModel, outcome: str, error: type[api_errors.ApiError], status: int, code: str
) -> None:
    transcript = Transcript(replace(COMPLETION, requests=2), model, ["a", "b"])
    transcript.feed(StepItem("b", 0, (), Outcome(outcome, "the reason")))
    assert transcript.ended
    assert type(transcript.error) is error
    assert (transcript.error.status, transcript.error.code, str(transcript.error)) == (status, code, "the reason")
    # A request that ends well afterwards does not hide it.
    transcript.feed(item("a", 0, "x", reason="stop"))
    assert transcript.outcome == Outcome(outcome, "the reason")
    assert transcript.error is not None


@pytest.mark.parametrize(
    ("dialect", "continues", "text"),
    [("chat", False, "a"), ("message", False, "a"), ("message", True, " a"), ("completion", False, " a")],
)
def test_only_a_text_of_its_own_loses_its_first_space(
    model: ServedModel, dialect: str, continues: bool, text: str
) -> None:
    metadata = replace(COMPLETION, dialect=dialect, continues_message=continues)
    transcript = Transcript(metadata, replace(model, drops_first_space=True), ["a"])
    deltas = transcript.feed(item("a", 0, " a", reason="stop"))
    assert "".join(delta.text + delta.rest for delta in deltas) == text


# --- Call metadata survives its message; everything else is refused ---------------------------------------------------


ABOUT = CallMetadata("chat", 1_700_000_000, 3, True, ("x", "stop😀"), 17, 1, True)
LABELS = {f"{n:02}" + "😀" * 62: "😀" * 512 for n in range(16)}


# The fields that are an array of their own in the message.
ANSWER = {
    "echoes_prompt": True,
    "logprobs": 20,
    "prompt_logprobs": 0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": False,
    "continues_message": True,
    "continuous_usage": True,
    "system_fingerprint": "fp_abc_1",
}


# Each field has another value than by default, and the largest that it may have.
FULL = replace(
    ABOUT,
    stop=("😀" * 1024,) * 16,
    include_stop_str_in_output=True,
    metadata=tuple(LABELS.items()),
    service_tier="flex",
    prompt_cache_key="😀" * 512,
    **ANSWER,
    output_spec="{}",
    echo="{}",
    adapter="a" * MAX_ADAPTER_NAME,
)


@pytest.mark.parametrize("metadata", [ABOUT, FULL])
def test_what_is_noted_about_a_call_survives_the_way(metadata: CallMetadata) -> None:
    assert CallMetadata.decode(metadata.encode()) == metadata
    assert metadata.model_name("model") == (metadata.adapter or "model")


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


def test_too_many_labels_of_a_note_are_named() -> None:
    with pytest.raises(MessageError, match="metadata must have at most 16 pairs"):
        CallMetadata.decode(replace(FULL, metadata=(("a", "b"),) * 17).encode())


# ---  -----------------------------------------------------------------------------------------------------------------


REQUEST = "0" * 32
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


class Scripted:
    """A parser that returns the parts of a script for its texts."""

    def __init__(self, **script: list[AnswerPart]) -> None:
        self._script = script

    def push(self, text: str) -> list[AnswerPart]:
        return self._script[text]

    def finish(self) -> list[AnswerPart]:
        return self._script["finish"]


def test_the_id_of_a_call_follows_from_its_token_and_its_number() -> None:
    two = [
        AnswerPart(PartKind.CALL, "f", 0),
        AnswerPart(PartKind.ARGUMENTS, "{}", 0),
        AnswerPart(PartKind.CALL, "g", 1),
    ]
    parts = ChoiceParts(Scripted(a=[], b=two, c=[AnswerPart(PartKind.CALL, "h", 2)], finish=[]), REQUEST, 1)
    assert parts.push("a", 3) == ()
    assert not parts.ends_with_call
    first, arguments, second = parts.push("b", 1)
    assert first == AnswerPart(PartKind.CALL, "f", 0, call_id(REQUEST, 1, 4))
    assert arguments == two[1]
    assert second.id == call_id(REQUEST, 1, 5)
    assert parts.push("c", 1) == (AnswerPart(PartKind.CALL, "h", 2, call_id(REQUEST, 1, 7)),), "one part that is a call"


def test_a_choice_ends_with_a_call_if_the_last_call_is_complete() -> None:
    first = [AnswerPart(PartKind.CALL, "f", 0), AnswerPart(PartKind.ARGUMENTS, "{}", 0)]
    second, begun = AnswerPart(PartKind.CALL, "g", 1), AnswerPart(PartKind.ARGUMENTS, '{"a"', 1)
    script = {"first": first, "second": [second, begun], "more": [AnswerPart(PartKind.ARGUMENTS, ": 1}", 1)]}
    parts = ChoiceParts(Scripted(**script, finish=[]), REQUEST, 0)
    found = []
    for text in ("first", "second", "more"):
        parts.push(text, 1)
        found.append(parts.ends_with_call)
    assert found == [True, False, True]


def test_reasoning_has_the_tokens_since_the_part_before() -> None:
    thought, said = AnswerPart(PartKind.REASONING, "x"), AnswerPart(PartKind.CONTENT, "y")
    parts = ChoiceParts(Scripted(a=[], b=[thought], c=[said], finish=[]), REQUEST, 0)
    parts.push("a", 1)
    parts.push("", 1)
    parts.push("b", 1)
    assert parts.reasoning_tokens == 3
    parts.push("c", 2)
    parts.push("b", 1)
    assert parts.reasoning_tokens == 4


# --- The text of one choice: what its tokens make certain, and where each token begins --------------------------------


def test_the_end_token_is_no_text_but_has_a_place(model: ServedModel) -> None:
    choice = ChoiceText(model, COMPLETION)
    ids = (*tokens("ab"), *model.eos_token_ids)
    text, scored = choice.push_scored(Delta(0, ids, "stop"), b"")
    assert (text, scored.offsets) == ("ab", (0, 1, 2))


# --- The text of a prompt, and where in it each token begins ----------------------------------------------------------


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
TEXTS = {name: TokenTexts(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def prompt_text(name: str, token_ids: list[int], skips: bool = True, records: bytes | None = None) -> PromptText:
    tokenizer = TOKENIZERS[name]
    silent = special_ids(tokenizer) if skips else ()
    report = PromptReport(0, pack_token_ids(token_ids), records)
    return PromptText(report, tokenizer, TEXTS[name], silent, drops_first_space(tokenizer), is_echoed=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["Hello you", " Hello you", "a 😀 b", "", "line\n\nline", "é"])
def test_a_text_is_echoed_as_it_was_sent(name: str, text: str) -> None:
    token_ids = TOKENIZERS[name].encode(text).ids
    if not token_ids:
        return
    prompt = prompt_text(name, token_ids)
    assert prompt.text == text
    assert len(prompt.offsets) == len(token_ids) + 1
    assert (prompt.offsets[0], prompt.offsets[-1]) == (0, len(text))


@given(st.sampled_from(list(TOKENIZERS)), st.text("ab é😀.\n", min_size=1, max_size=20))
def test_a_token_begins_where_the_text_of_those_before_it_ends(name: str, text: str) -> None:
    token_ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    prompt = prompt_text(name, token_ids)
    assert prompt.offsets == sorted(prompt.offsets)
    for at, offset in enumerate(prompt.offsets):
        before = TOKENIZERS[name].decode(token_ids[:at])
        if "\ufffd" not in before and prompt.text.startswith(before):
            assert offset == len(before)


def test_special_tokens_have_a_text_only_if_it_is_asked_for() -> None:
    tokenizer = TOKENIZERS["byte level"]
    [special, *_] = sorted(special_ids(tokenizer))
    name = tokenizer.id_to_token(special)
    token_ids = [*tokenizer.encode("ab", add_special_tokens=False).ids, special, *tokenizer.encode("c").ids]
    assert prompt_text("byte level", token_ids).text == "abc"
    shown = prompt_text("byte level", token_ids, skips=False)
    assert shown.text == f"ab{name}c"
    assert shown.offsets[-3:] == [2, 2 + len(name), 3 + len(name)]


def test_the_first_token_has_no_score() -> None:
    records = struct.pack("<fIfI", -0.5, 1, -1.5, 7)
    prompt = prompt_text("byte level", [5, 6, 7], records=records)
    assert prompt.is_scored
    assert list(prompt.scores()) == [None, PromptTokenLogprobs(-0.5, 1, ()), PromptTokenLogprobs(-1.5, 7, ())]
    assert not prompt_text("byte level", [5]).is_scored

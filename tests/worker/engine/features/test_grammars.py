"""Answers that follow a grammar, through the whole engine, also after preemption and resumption."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from quire import kernels
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from quire.shared.protocol.messages import GenerationRequest, SamplingParams, StepItem
from quire.shared.text import grammar
from quire.shared.text.grammar import ANY_OBJECT, write
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.grammars import KEPT, Grammars
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.offline import complete
from quire.worker.engine.sampler import restrict
from quire.worker.engine.sequence import DEAD_END
from quire.worker.models.native.decoder import Decoder
from quire.worker.queue.engine_thread import EngineThread
from tests.support.tokenizers import PANICS, panicking

DEMO = PROJECT_ROOT / DEFAULT_MODEL

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "kind": {"enum": ["story", "small talk"]},
        "pages": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/next"}]},
    },
    "required": ["title", "kind", "pages", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "next": {
            "type": "object",
            "properties": {"page": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["page"],
            "additionalProperties": False,
        }
    },
}
TEXT = write("json_schema", SCHEMA)
WRONG = write("json_schema", {"type": "strin"})
# The longest answer of SCHEMA is shorter: each character of a string is a token at most.
ENOUGH = 160


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder.load(DEMO, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")


def make_engine(model: Decoder, tokenizer: Tokenizer, ahead: bool = False, **limits: Any) -> Engine:
    sizes = {"num_blocks": 300, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    eos = model.config.eos_token_ids
    grammars = Grammars(tokenizer, model.vocab_size, eos)
    chosen = EngineLimits(**({"max_model_len": model.max_model_len} | sizes | limits))
    options: dict[str, Any] = {"runner": partial(DeviceRunner, graph_buckets=[])} if ahead else {}
    engine = Engine(model, chosen, eos, tokenizer, grammars=grammars, **options)
    engine.checks_itself = True
    return engine


def prompts(tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    return [tuple(tokenizer.encode(f"{i}. Tell me a story about a lantern.").ids) for i in range(count)]


def params(index: int, **changes: Any) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.5, "top_p": 0.9, "n": 2},
        {"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "n": 2, "best_of": 3},
        {"temperature": 0.8, "top_k": 1, "logprobs": True, "top_logprobs": 2},
    ]
    chosen = kinds[index % len(kinds)] | {"max_tokens": ENOUGH, "seed": index, "grammar": TEXT}
    return SamplingParams(**(chosen | changes))


@pytest.mark.slow
def test_every_answer_follows_its_schema_in_a_batch_with_requests_without_one(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    """The engine is so small that groups are preempted. It waits for each step, or runs ahead."""
    asked = [params(i) if i % 4 else SamplingParams(max_tokens=20, temperature=1.0, seed=i) for i in range(16)]
    both = []
    for ahead in (False, True):
        engine = make_engine(model, tokenizer, ahead, num_blocks=40)
        both.append(complete(engine, prompts(tokenizer, 16), asked))
        assert engine.groups.num_preemptions > 0
    waiting, found = both
    texts = []
    for one, choices in zip(asked, found, strict=True):
        for choice in choices if one.grammar else ():
            text = tokenizer.decode(choice.token_ids)
            jsonschema.validate(json.loads(text), SCHEMA)
            texts.append(text)
    assert len(set(texts)) > len(texts) // 2
    alone = [
        complete(make_engine(model, tokenizer), [prompt], [one])[0]
        for prompt, one in zip(prompts(tokenizer, 16), asked, strict=True)
    ]
    tokens = [[[choice.token_ids for choice in choices] for choices in one] for one in (found, waiting, alone)]
    assert tokens[0] == tokens[1] == tokens[2]


def tokens_of(items: list[StepItem]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for delta in (delta for item in items for delta in item.deltas):
        found.setdefault(delta.choice, []).extend(delta.token_ids)
    return found


def run(engine: Engine, request: GenerationRequest, earlier: tuple[StepItem, ...] = ()) -> list[StepItem]:
    engine.add(request, earlier)
    items = []
    while engine.has_work:
        items += engine.step()
    return items


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_an_answer_that_another_attempt_began_continues_as_it_would_have(
    model: Decoder, tokenizer: Tokenizer, kind: int
) -> None:
    (prompt,) = prompts(tokenizer, 1)
    request = GenerationRequest("r", "demo", prompt, params(kind))
    whole = run(make_engine(model, tokenizer), request)
    assert whole[-1].outcome is not None
    assert whole[-1].outcome.name == "stop"
    for cut in range(1, len(whole), len(whole) // 4):
        rest = run(make_engine(model, tokenizer), request, tuple(whole[:cut]))
        assert tokens_of(whole[:cut] + rest) == tokens_of(whole)
        assert rest[-1].outcome == whole[-1].outcome


def test_log_probabilities_are_those_of_the_model_before_the_grammar(model: Decoder, tokenizer: Tokenizer) -> None:
    """A token that is the only allowed one does not have probability 1."""
    [[choice]] = complete(make_engine(model, tokenizer), prompts(tokenizer, 1), [params(5)])
    assert tokenizer.decode(choice.token_ids[:1]) == '{"' or tokenizer.decode(choice.token_ids[:1]) == "{"
    assert choice.logprobs[0].logprob < -1


def refused(engine: Engine, request: GenerationRequest) -> str:
    with pytest.raises(RequestRefused) as caught:
        engine.add(request)
    assert not engine.has_work
    return str(caught.value)


def test_requests_that_cannot_be_followed_are_refused_alone(model: Decoder, tokenizer: Tokenizer) -> None:
    def asks(**changes: Any) -> GenerationRequest:
        return GenerationRequest("r", "demo", (5, 6), params(0, **changes))

    engine = make_engine(model, tokenizer)
    assert "the grammar cannot be followed: Invalid type" in refused(engine, asks(grammar=WRONG))
    assert "a beam search does not follow" in refused(engine, asks(beam_width=2))
    without = Engine(model, engine.limits, engine.eos_token_ids, tokenizer)
    assert "this engine has no grammars" in refused(without, asks())
    untold = Grammars(None, model.vocab_size, engine.eos_token_ids)
    without = Engine(model, engine.limits, engine.eos_token_ids, tokenizer, grammars=untold)
    assert "this worker has no tokenizer" in refused(without, asks())
    endless = Grammars(tokenizer, model.vocab_size, ())
    without = Engine(model, engine.limits, (), tokenizer, grammars=endless)
    assert "the model has no end token" in refused(without, asks())


def test_an_engine_serves_with_a_tokenizer_that_llguidance_does_not_support(
    model: Decoder, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    class Strange:
        def get_vocab_size(self, with_added_tokens: bool) -> int:
            return 10

        def to_str(self) -> str:
            return "{}"

    grammars = Grammars(Strange(), 10, (2,))
    assert "answers cannot be made to follow a grammar" in caplog.text
    with pytest.raises(RequestRefused, match="the tokenizer of the model is of a kind that allows none"):
        grammars.matcher(TEXT)


def test_the_output_of_an_earlier_attempt_must_follow_the_schema_too(model: Decoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer)
    request = GenerationRequest("r", "demo", (5, 6), params(0))
    begun = run(make_engine(model, tokenizer), GenerationRequest("r", "demo", (5, 6), SamplingParams(4, grammar="")))
    with pytest.raises(RequestRefused, match=DEAD_END) as caught:
        engine.add(request, tuple(begun[:2]))
    assert "token" not in str(caught.value), "which the answer may not be read in"
    assert not engine.has_work


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", [0, 2, 4], ids=["streamed", "choices", "ranked"])
def test_a_grammar_that_gives_up_ends_its_request_alone(
    model: Decoder, tokenizer: Tokenizer, kind: int, ahead: bool
) -> None:
    engine = make_engine(model, tokenizer, ahead)
    prompt, other = prompts(tokenizer, 2)
    engine.add(GenerationRequest("good", "demo", prompt, params(0)))
    engine.add(GenerationRequest("bad", "demo", other, params(kind)))
    items = [item for _ in range(6) for item in engine.step()]
    [matcher, *_] = [one.matcher for one in engine.requests["bad"].sequences]
    assert matcher is not None
    matcher._matcher.consume_token(next(iter(engine.eos_token_ids)))  # which it does not allow here
    assert matcher.error is not None
    while engine.has_work:
        items += engine.step()
    *before, last = [item for item in items if item.request_id == "bad"]
    assert last.outcome is not None
    assert (last.outcome.name, last.deltas) == ("error", ())
    assert last.outcome.detail.startswith(DEAD_END)
    assert last.start == sum(len(delta.token_ids) for item in before for delta in item.deltas)
    good = [token for item in items if item.request_id == "good" for delta in item.deltas for token in delta.token_ids]
    jsonschema.validate(json.loads(tokenizer.decode(good)), SCHEMA)
    assert engine.scheduler.blocks.num_free == engine.limits.num_blocks


def test_a_grammar_may_give_up_with_the_last_token_that_was_asked_for(model: Decoder, tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer)
    engine.add(GenerationRequest("r", "demo", *prompts(tokenizer, 1), params(0, max_tokens=9)))
    [sequence] = engine.requests["r"].sequences
    while sequence.num_output_tokens < 8:
        engine.step()
    assert sequence.matcher is not None
    sequence.matcher.consume(engine.eos_token_ids)
    [item] = engine.step()
    assert item.outcome is not None
    assert (item.start, item.deltas, item.outcome.name) == (8, (), "error")
    assert not engine.has_work
    assert engine.scheduler.blocks.num_free == engine.limits.num_blocks


def test_matchers_are_made_once_for_a_schema_and_the_oldest_are_forgotten(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), (2,))
    grammars.matcher(ANY_OBJECT)
    first = grammars.matcher(TEXT)
    first.consume(tokenizer.encode('{"title"').ids)
    assert (grammars.matcher(TEXT).allowed() != first.allowed()).any()
    grammars.matcher(ANY_OBJECT)
    for number in range(KEPT - 1):
        grammars.matcher(write("json_schema", {"const": number}))
    assert len(grammars._matchers) == KEPT
    assert TEXT not in grammars._matchers
    assert ANY_OBJECT in grammars._matchers  # it came first, and was asked for since


def test_a_cached_schema_does_not_wait_for_another_one_in_preparation(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for no other may be the engine's."""
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), (2,))
    grammars.matcher(TEXT)
    has_begun, may_end, make = threading.Event(), threading.Event(), grammar.matcher

    def made_slowly(text: str, tokens: LLTokenizer, special_tokens: Collection[str]) -> LLMatcher:
        has_begun.set()
        assert may_end.wait(60)
        return make(text, tokens, special_tokens)

    monkeypatch.setattr(grammar, "matcher", made_slowly)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(grammars.matcher, ANY_OBJECT)
        assert has_begun.wait(60)
        try:
            threads.submit(grammars.matcher, TEXT).result(60)
            assert not slow.done()
        finally:
            may_end.set()
        assert slow.result(60).error is None


def test_a_panic_of_the_library_refuses_the_grammar(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.shared.text.grammar.matcher", lambda *_: panicking().encode(PANICS))
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), (2,))
    with pytest.raises(RequestRefused, match="the grammar cannot be followed: Onig: Regex search error: retry-limit"):
        grammars.matcher(ANY_OBJECT)


def test_a_schema_that_cannot_be_followed_is_tried_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that prepares requests tries it, and the engine does not try again."""
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), (2,))
    with pytest.raises(RequestRefused, match="Invalid type") as first:
        grammars.matcher(WRONG)
    monkeypatch.setattr(grammar, "matcher", None)
    with pytest.raises(RequestRefused, match="Invalid type") as second:
        grammars.matcher(WRONG)
    assert str(first.value) == str(second.value)


def test_a_grammar_is_prepared_before_the_engine_gets_the_request(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a schema that cannot be followed is prepared, too."""
    engine = make_engine(model, tokenizer)
    loop = EngineThread(engine, emit=lambda commits, computed: None, ended=lambda: None)
    good, bad = (GenerationRequest("r", "demo", (5, 6), params(0, grammar=text)) for text in (TEXT, "[]"))
    for request in (good, bad):
        loop.prepare(request)
    monkeypatch.setattr(grammar, "matcher", None)
    assert "cannot be followed" in refused(engine, bad)
    engine.add(good)
    engine.drop("r")


def test_a_model_with_fewer_tokens_than_its_tokenizer_is_told_of_its_own(tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    whole, part = (Grammars(tokenizer, count, (2,)).matcher(ANY_OBJECT).allowed() for count in (size, size - 100))
    assert (whole == part).all()
    logits = torch.zeros(size - 100)
    restrict(logits[None], {0: part})
    bits = np.unpackbits(whole.view(np.uint8), bitorder="little")[: size - 100]
    assert (logits.numpy() == 0).tolist() == bits.astype(bool).tolist()


def test_a_model_with_more_tokens_than_its_tokenizer_never_draws_them(tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    allowed = Grammars(tokenizer, size + 100, (2,)).matcher(ANY_OBJECT).allowed()
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")
    assert bits[:size].any()
    assert not bits[size:].any()
    assert LLTokenizer(tokenizer.to_str(), n_vocab=size + 100, eos_token=[2]).vocab_size == size + 100


def test_a_mask_that_fails_is_an_error_and_stays_one(tokenizer: Tokenizer) -> None:
    schema = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 89, 83, 79, 73, 71, 67)]}
    matcher = Grammars(tokenizer, tokenizer.get_vocab_size(), (2,)).matcher(write("json_schema", schema))
    for digit in "12345678":
        matcher.allowed()
        matcher.consume([tokenizer.token_to_id(digit)])
    assert matcher.error is not None
    matcher.allowed()
    assert matcher.error is not None


def test_every_end_token_that_the_model_has_ends_an_answer(tokenizer: Tokenizer) -> None:
    """An end token that the model does not have is ignored."""
    size = tokenizer.get_vocab_size()
    for end in (2, 3):
        matcher = Grammars(tokenizer, size, (2, 3, size + 1000)).matcher(write("json_schema", {"const": 1}))
        bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
        assert not bits[[2, 3]].any()
        matcher.consume([tokenizer.token_to_id("1")])
        bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == [2, 3]
        early = Grammars(tokenizer, size, (2, 3)).matcher(write("json_schema", {"const": 1}))
        early.consume([end])
        assert early.error is not None, "the answer would end here, and be none"
        matcher.consume([end])
        assert matcher.error is None


DIGITS = {"type": "regex", "pattern": "[0-9]{1,3}"}
STRUCTURED: list[tuple[str, Any, str]] = [
    ("regex", "[A-Z][a-z]{2,9}( [a-z]{1,9}){0,4}\\.", r"[A-Z][a-z]{2,9}( [a-z]{1,9}){0,4}\."),
    ("choice", ["a heron", "an owl", "no bird"], "a heron|an owl|no bird"),
    ("ebnf", 'root ::= "(" [a-z]{1,5} (", " root)? ")"', r"\([a-z]{1,5}(, \([a-z]{1,5}.*\))?\)"),
    ("lark", 'start: "I see " BIRD "."\nBIRD: /[a-z]{3,8}/', r"I see [a-z]{3,8}\."),
    (
        "structural_tag",
        {"format": {"type": "tag", "begin": "<b>", "content": DIGITS, "end": "</b>"}},
        "<b>[0-9]{1,3}</b>",
    ),
]  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True])
def test_an_answer_follows_a_grammar_of_every_kind(model: Decoder, tokenizer: Tokenizer, ahead: bool) -> None:
    assert {kind for kind, _, _ in STRUCTURED} | {"json_schema"} == set(grammar.KINDS)
    asked = [params(0, temperature=1.0, max_tokens=120, grammar=write(kind, value)) for kind, value, _ in STRUCTURED]
    found = complete(make_engine(model, tokenizer, ahead), prompts(tokenizer, len(asked)), asked)
    for (kind, _, pattern), [choice] in zip(STRUCTURED, found, strict=True):
        if kind != "ebnf" or choice.finish_reason == "stop":  # this grammar nests without end
            assert choice.finish_reason == "stop", kind
            assert re.fullmatch(pattern, tokenizer.decode(choice.token_ids)), kind


def test_a_special_token_that_a_grammar_names_is_the_token(tokenizer: Tokenizer) -> None:
    matcher = Grammars(tokenizer, tokenizer.get_vocab_size(), (2,)).matcher(write("lark", 'start: <|user|> "a"'))
    bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [tokenizer.token_to_id("<|user|>")]

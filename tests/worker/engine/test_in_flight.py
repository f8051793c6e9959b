"""An engine that runs one step ahead gives the results of a synchronous one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from quire.shared.protocol.messages import Delta, Outcome, StepItem
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.transfers import SampledTokens
from quire.worker.inspect.snapshot import take_snapshot
from quire.worker.pinned_prefixes import pin
from tests.support.mock_model import (
    DEAD_ENDS,
    ENDLESS,
    EOS,
    MockModel,
    assert_idle,
    continuation,
    final,
    graphed,
    make_engine,
    request,
    run,
    steps,
)


@pytest.fixture(params=[DeviceRunner, pytest.param(graphed, marks=pytest.mark.slow)], ids=["launched", "replayed"])
def ahead(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Return a function that makes an engine that runs ahead, kernel by kernel or by graphs."""
    return partial(make_engine, runner=request.param)


def tokens(items: list[StepItem], name: str, choice: int = 0) -> list[int]:
    """Return the tokens of a choice. Checks that its items follow each other without a gap."""
    mine = [item for item in items if item.request_id == name]
    at = 0
    for item in mine:
        assert item.start == at
        at += sum(len(delta.token_ids) for delta in item.deltas)
    deltas = [delta for item in mine for delta in item.deltas if delta.choice == choice]
    return [token for delta in deltas for token in delta.token_ids]


def last(items: list[StepItem], name: str) -> StepItem:
    ended = [item for item in items if item.request_id == name and item.outcome is not None]
    assert len(ended) == 1
    return ended[0]


def ends_early(least: int = 2, most: int = 10) -> tuple[int, ...]:
    """Return a prompt whose text ends with an end token after some tokens, before max_tokens."""
    for first in range(1, 97):
        found = continuation((first, 5), 16)
        if found[-1] == EOS and least <= len(found) <= most:
            return first, 5
    raise AssertionError("no such prompt")


def test_a_step_is_launched_before_the_tokens_of_the_previous_one_are_collected(ahead: Callable[..., Engine]) -> None:
    engine = ahead()
    engine.add(request("r", (1, 2, 3), ignore_eos=True))
    assert engine.step() == []  # the prompt is under way
    first = engine.step()
    assert engine.num_steps == 2
    assert first == [StepItem("r", 0, (Delta(0, (continuation((1, 2, 3), 1)[0],), None, None, None),), None)]
    items = first + run(engine)
    assert tokens(items, "r") == continuation((1, 2, 3), 8, ignore_eos=True)
    # The length of a text is known before its last token is: no step is computed in vain.
    assert engine.runner.model.num_computed == 3 + 7


# Parameters that need more of a step than the most probable tokens.
FEATURES: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True},
    "top logprobs": {"logprobs": True, "top_logprobs": 3},
    "ranked": {"n": 2, "best_of": 3, "temperature": 1.0, "seed": 3, "logprobs": True},
    "bias": {"logit_bias": ((5, 3.0), (9, -100.0), (40, 2.0))},
    "allowed tokens": {"allowed_token_ids": (0, *range(3, 97, 4))},
    "min_tokens": {"min_tokens": 7},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 0.8},
    "repetition penalty": {"repetition_penalty": 1.4},
    "banned words": {"bad_words": ("b", "cd", "ef", "gh", "xyz")},
    "grammar": {"grammar": ENDLESS},
    "dead ends": {"grammar": DEAD_ENDS, "n": 1},
    "all": {
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": ((5, 3.0), (9, -100.0)),
        "min_tokens": 4,
        "frequency_penalty": 0.8,
        "repetition_penalty": 1.4,
        "bad_words": ("b", "cd"),
        "grammar": ENDLESS,
    },
}


def long_text(feature: str) -> dict[str, Any]:
    """Return the parameters of a request with a feature whose text has at least 20 tokens."""
    # After its end token an answer follows no grammar any more.
    lasts = {"min_tokens": 20} if "grammar" in FEATURES[feature] else {"ignore_eos": True}
    return {"max_tokens": 20} | FEATURES[feature] | lasts


def launches_and_reads(engine: Engine, patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows whenever the model is launched, and whenever the tokens of a step are read."""
    found: list[str] = []
    forward, wait = engine.runner.model.forward, SampledTokens.wait

    def launch(*args: Any) -> Any:
        found.append("launch")
        return forward(*args)

    def read(tokens: SampledTokens) -> Any:
        found.append("read")
        return wait(tokens)

    patch.setattr(engine.runner.model, "forward", launch)
    patch.setattr(SampledTokens, "wait", read)
    return found


@pytest.mark.parametrize("feature", [one for one in FEATURES if one != "dead ends"])
@pytest.mark.parametrize("has_others", [False, True], ids=["alone", "mixed"])
def test_a_step_with_this_request_is_launched_before_the_tokens_of_the_previous_one_are_read(
    ahead: Callable[..., Engine], feature: str, has_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ahead(branches=True)
    found = launches_and_reads(engine, monkeypatch)
    engine.add(request("r", (1, 2, 3), **long_text(feature)))
    if has_others:
        engine.add(request("other", (4, 5), max_tokens=12, ignore_eos=True))
    steps(engine, 9)
    assert found == ["launch", *["launch", "read"] * 8]


@pytest.mark.parametrize(
    ("feature", "preemption"),
    [("all", "recompute"), *((one, ("swap", "recompute")[at % 2]) for at, one in enumerate(FEATURES))],
)
def test_results_are_those_of_an_engine_that_waits_for_each_step(
    ahead: Callable[..., Engine], feature: str, preemption: str
) -> None:
    engines = [make(branches=True, **SCARCE, preemption=preemption) for make in (make_engine, ahead)]
    expected, items = (run(engine) for engine in engines if add_mixed(engine, feature))
    assert all(engine.groups.num_preemptions > 0 for engine in engines)
    assert results(items) == results(expected)


@pytest.mark.parametrize(
    ("feature", "cut"),
    [("all", 1), *((one, 1 + 3 * (at % 2)) for at, one in enumerate(FEATURES) if one not in ("ranked", "dead ends"))],
)
def test_another_attempt_continues_a_text_as_it_would_have_gone_on(
    ahead: Callable[..., Engine], feature: str, cut: int
) -> None:
    asked = request("r", (6, 7, 8), n=2, temperature=1.0, seed=4, **long_text(feature))
    plain, first, second = make_engine(branches=True), ahead(branches=True), ahead(branches=True)
    plain.add(asked)
    expected = run(plain)
    first.add(asked)
    begun: list[StepItem] = []
    while len(begun) < cut:
        begun += first.step()
    second.add(asked, tuple(begun))
    assert results(begun + run(second)) == results(expected)


SCARCE = {"num_blocks": 20, "num_host_blocks": 40, "prefix_caching": True}


def add_mixed(engine: Engine, feature: str) -> bool:
    """Add requests with a feature, drawn and greedy ones, of one and more choices, and as many without."""
    for index in range(10):
        params = [
            {"seed": index, "temperature": 1.0 if index % 3 else 0.0, "stop": ("x",) if index == 3 else ()},
            {"n": 1 + index // 4, "max_tokens": 12 + index},
            FEATURES[feature] if index % 2 else {},
        ]
        merged = {name: value for one in params for name, value in one.items()}
        engine.add(request(f"r{index}", range(index + 1, index + 8 + index % 5), **merged))
    return True


def results(items: list[StepItem]) -> dict[str, tuple[Any, ...]]:
    """Return the choices of each request, and its outcome."""
    return {name: (final(items, name), last(items, name).outcome) for name in {item.request_id for item in items}}


def test_the_token_in_flight_of_a_text_that_has_ended_is_dropped(ahead: Callable[..., Engine]) -> None:
    prompt = ends_early()
    engine = ahead(prefix_caching=True)
    engine.add(request("r", prompt, max_tokens=16))
    items = run(engine)
    text = continuation(prompt, 16)
    assert tokens(items, "r") == text
    assert last(items, "r").outcome.name == "stop"
    assert engine.runner.model.num_computed == len(prompt) + len(text) - 1 + 1
    engine.add(request("again", (*prompt, *text), max_tokens=4))
    assert tokens(run(engine), "again") == continuation((*prompt, *text), 4)


def test_a_preempted_group_resumes_only_after_its_token_in_flight_is_known(
    ahead: Callable[..., Engine],
) -> None:
    engine = ahead(max_num_seqs=4, num_host_blocks=64)
    engine.add(request("wide", (1, 2, 3), n=3, max_tokens=30, ignore_eos=True), priority=2)
    engine.add(request("narrow", (4, 5, 6), max_tokens=12, ignore_eos=True), priority=2)
    items = steps(engine, 5)
    engine.add(request("urgent", (7, 8), n=2, max_tokens=20, ignore_eos=True), priority=0)
    items += run(engine)
    assert engine.groups.counters.for_higher_class == 2
    assert tokens(items, "narrow") == continuation((4, 5, 6), 12, ignore_eos=True)


def test_steps_run_ahead_again_once_a_synchronous_request_has_ended(
    ahead: Callable[..., Engine],
) -> None:
    plain, other = make_engine(branches=True), ahead(branches=True)
    for engine in (plain, other):
        engine.add(request("long", (3, 4), max_tokens=40, ignore_eos=True))
    items = steps(other, 3)
    for engine in (plain, other):
        engine.add(request("beams", (5, 6, 7), beam_width=3, n=2, max_tokens=6))
        engine.add(request("penalty", (5, 6, 8), presence_penalty=1.0, max_tokens=6))
    items += steps(other, 2)
    assert other._in_flight is None
    items += steps(other, 12)
    assert other._in_flight is not None
    items += run(other)
    expected = run(plain)
    for name in ("long", "beams", "penalty"):
        assert tokens(items, name) == tokens(expected, name)


def test_changes_of_tables_do_not_pile_up_while_steps_are_synchronous(
    ahead: Callable[..., Engine],
) -> None:
    engine = ahead()
    engine.add(request("r", (1, 2), presence_penalty=1.0, max_tokens=60, ignore_eos=True))
    for _ in range(50):
        engine.step()
        assert len(engine.input_batch.changes or ()) <= 1
    run(engine)


def test_a_cancelled_request_counts_its_tokens_in_flight(ahead: Callable[..., Engine]) -> None:
    engine = ahead()
    engine.add(request("r", (1, 2), max_tokens=50, ignore_eos=True))
    engine.add(request("s", (1, 3), max_tokens=6, ignore_eos=True))
    items = steps(engine, 4)
    ended = engine.finish("r", "cancelled")
    assert ended is not None
    items += [ended, *run(engine)]
    assert last(items, "r") is ended
    # Four steps: the prompt, which gives the first token, and three more tokens.
    assert tokens(items, "r") == continuation((1, 2), 4, ignore_eos=True)
    assert tokens(items, "s") == continuation((1, 3), 6, ignore_eos=True)
    assert_idle(engine)


def test_steps_are_smaller_once_device_memory_has_run_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[Any] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: handled.append(sys.exc_info()[0]))
    model = MockModel(fits=9)
    engine = make_engine(runner=DeviceRunner, model=model, max_num_batched_tokens=64, max_num_seqs=4)
    prompts = {name: tuple(range(1, length)) for name, length in (("r", 60), ("s", 31), ("t", 7))}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=12, ignore_eos=True))
    items = run(engine)
    for name, prompt in prompts.items():
        assert tokens(items, name) == continuation(prompt, 12, ignore_eos=True)
    sizes = [record.args for record in caplog.records if record.name == "quire.worker.engine.engine"]
    assert sizes == [(64, 32), (32, 16), (16, 8)]
    assert take_snapshot(engine).usage().max_prefill_tokens == 8
    assert handled == [None] * 3  # while an error is handled, what its traceback holds cannot be freed

    model.fits = 3  # fewer than one for each sequence: nothing can be done
    for name in ("a", "b", "c", "d"):
        engine.add(request(name, (1, 2), max_tokens=12))
    with pytest.raises(torch.OutOfMemoryError):
        run(engine)


def test_a_step_that_fails_loses_no_token_of_the_previous_step(
    ahead: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last items of the failed requests follow their earlier ones: otherwise their logs would have a gap."""
    engine = ahead()
    for name in ("r", "s", "t"):
        engine.add(request(name, (1, 2), max_tokens=50, ignore_eos=True))
    items = steps(engine, 4)
    items += filter(None, [engine.finish("t", "cancelled")])  # now the tokens of the step under way are known

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner, "decode", fails)
    monkeypatch.setattr(engine.runner, "execute", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    items += engine.fail("failed")
    for name in ("r", "s"):
        assert tokens(items, name) == continuation((1, 2), 4, ignore_eos=True)
        assert last(items, name).outcome == Outcome("error", "failed")
    assert_idle(engine)


def test_sampling_that_fails_after_it_read_the_tokens_of_the_previous_step_loses_none_of_them(
    ahead: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other = make_engine(branches=True), ahead(branches=True)
    for engine in (plain, other):
        engine.add(request("r", (1, 2), max_tokens=50, presence_penalty=1.0, ignore_eos=True))
    expected, items = run(plain), steps(other, 4)

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(other.runner, "sample", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        other.step()
    items += other.fail("failed")
    assert tokens(items, "r") == tokens(expected, "r")[:4]
    assert last(items, "r").outcome == Outcome("error", "failed")
    assert_idle(other)


def test_a_pinned_prefix_of_several_chunks_is_pinned_with_its_blocks(ahead: Callable[..., Engine]) -> None:
    engine = ahead(max_num_batched_tokens=8)
    prefix = tuple(range(1, 23))
    pin(engine, "long", prefix)
    [pinned] = engine.groups.blocks.pinned
    assert (len(pinned.blocks), pinned.num_tokens) == (6, 22)
    engine.add(request("r", (*prefix, 50), ignore_eos=True))
    before = engine.num_prefill_tokens
    assert tokens(run(engine), "r") == continuation((*prefix, 50), 8, ignore_eos=True)
    assert engine.num_prefill_tokens - before == 1

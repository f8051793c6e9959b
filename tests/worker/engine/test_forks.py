"""A fork that changes nothing gives the tokens of the original, and takes its blocks while that one runs on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.runner import Runner
from tests.support import mock_model
from tests.support.mock_model import assert_idle, final, make_engine
from tests.worker.engine.features import test_replay
from tests.worker.engine.features.test_replay import DRAWN, SCHEMA, write

engine = test_replay.engine  # a fixture
PROMPT = tuple(range(3, 24))
BLOCK = 4


def fork_of(original: GenerationRequest, output: tuple[int, ...], at: int, name: str = "fork") -> GenerationRequest:
    """Return the fork that changes nothing, as the gateway makes it."""
    sampling = original.sampling
    left = replace(sampling, max_tokens=sampling.max_tokens - at, min_tokens=max(0, sampling.min_tokens - at))
    prompt = original.prompt + output[:at]
    return replace(original, id=name, prompt=prompt, sampling=left, forked_from=original.id, num_kept=at)


def run_to(engine: Engine, count: int, name: str = "r") -> tuple[list[Any], tuple[int, ...]]:
    """Step until a request has emitted a number of tokens. Returns all items, and its tokens."""
    items: list[Any] = []
    while True:
        tokens = tuple(t for item in items if item.request_id == name for delta in item.deltas for t in delta.token_ids)
        if len(tokens) >= count:
            return items, tokens
        items += engine.step()


def finish(engine: Engine, items: list[Any]) -> list[Any]:
    while engine.has_work:
        items += engine.step()
    return items


@pytest.mark.parametrize("runner", [Runner, DeviceRunner, mock_model.graphed])
@pytest.mark.parametrize("at", [1, 3, 11, 16, 30])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 9},
        {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.8, "repetition_penalty": 1.3},
        {"bad_words": ("bc", "ca", "zz"), "temperature": 1.0, "seed": 4},
    ],
)
def test_a_fork_of_a_running_request_gives_its_tokens(runner: Any, at: int, params: dict[str, Any]) -> None:
    engine = make_engine(branches=True, runner=runner, prefix_caching=True, block_size=BLOCK)
    original = mock_model.request("r", PROMPT, max_tokens=50, ignore_eos=True, **params)
    engine.add(original)
    items, tokens = run_to(engine, at)
    engine.add(fork_of(original, tokens, at))
    began = len(items)
    for _ in range(2 + engine.runner.looks_ahead):  # a device that is ahead returns the tokens of a step with the next
        items += engine.step()
    report = next(item.report for item in items[began:] if item.request_id == "fork")
    # What full blocks hold is not computed again; the newest token of the original may not be computed yet.
    assert report.cached_tokens >= (len(PROMPT) + at - 1) // BLOCK * BLOCK
    finish(engine, items)
    [first], [second] = final(items, "r"), final(items, "fork")
    assert second.token_ids == first.token_ids[at:]
    assert second.finish_reason == first.finish_reason
    assert_idle(engine)


def test_the_original_ends_before_the_fork_and_is_preempted(engine: Engine) -> None:
    small = make_engine(branches=True, prefix_caching=True, num_blocks=26, block_size=BLOCK)
    original = mock_model.request("r", PROMPT, max_tokens=40, ignore_eos=True, temperature=1.0, seed=2)
    small.add(original)
    items, tokens = run_to(small, 20)
    # More than fits together, so one of them is preempted.
    for number in range(3):
        small.add(fork_of(original, tokens, 20, f"fork{number}"))
    finish(small, items)
    [first] = final(items, "r")
    for number in range(3):
        [second] = final(items, f"fork{number}")
        assert second.token_ids == first.token_ids[20:]
    assert small.groups.num_preemptions > 0


@pytest.mark.parametrize("at", [2, 17, 29])
@pytest.mark.parametrize(
    "params",
    [
        DRAWN,
        DRAWN | {"presence_penalty": 0.6, "repetition_penalty": 1.1, "logprobs": True},
        DRAWN | {"bad_words": ("the", "and", "was a")},
        {"temperature": 1.0, "seed": 3, "max_tokens": 60, "min_tokens": 40},
        {"temperature": 1.0, "seed": 3, "max_tokens": 60, "grammar": write("json_schema", SCHEMA)},
        DRAWN | {"stop": ("e t", "ing")},
    ],
    ids=lambda params: "-".join(name for name in params if name not in DRAWN) or "drawn",
)
def test_history_is_that_of_the_original(engine: Engine, params: dict[str, Any], at: int) -> None:
    original = GenerationRequest("r", "m", test_replay.PROMPT, SamplingParams(**params))
    engine.add(original)
    items: list[Any] = []
    finish(engine, items)
    [first] = final(items, "r")
    at = min(at, len(first.token_ids) - 1)
    engine.add(fork_of(original, first.token_ids, at))
    finish(engine, items := [])
    [second] = final(items, "fork")
    assert second.token_ids == first.token_ids[at:]
    assert (second.finish_reason, second.matched_stop) == (first.finish_reason, first.matched_stop)
    found = test_replay.Replay(engine, fork_of(original, first.token_ids, at), 0, second.token_ids)
    found.run()
    assert found.difference is None


def test_another_seed_or_text_gives_another_answer(engine: Engine) -> None:
    original = GenerationRequest("r", "m", test_replay.PROMPT, SamplingParams(**DRAWN))
    engine.add(original)
    [first] = final(finish(engine, []), "r")
    same = fork_of(original, first.token_ids, 10)
    texts = set()
    for fork in (
        same,
        replace(same, sampling=replace(same.sampling, seed=12)),
        replace(same, prompt=(*same.prompt, 77, 78), num_kept=12),
    ):
        engine.add(fork)
        texts.add(final(finish(engine, []), "fork")[0].token_ids)
    assert len(texts) == 3

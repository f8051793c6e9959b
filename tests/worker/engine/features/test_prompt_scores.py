"""Scores of prompts are those of the model: with chunks, preemption, cached prefixes, other requests and no tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from quire.shared.protocol.logprobs import PromptTokenLogprobs, read_prompt_records
from quire.shared.protocol.messages import Outcome, PromptReport, StepItem
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine import scheduler
from quire.worker.engine.engine import Engine
from quire.worker.engine.runner import Runner
from tests.support.mock_model import START, MockModel, advance, graphed, make_engine, request, run, steps, text

PROMPT = tuple(range(3, 40))


def expected(prompt: tuple[int, ...], top: int) -> list[PromptTokenLogprobs]:
    """Return the scores of a prompt by the mock model's definition."""
    model, state, rows = MockModel(branches=True), START, []
    for token in prompt[:-1]:
        state = advance(state, token)
        rows.append(model.logits_of([state])[0].double())
    found = []
    for row, token in zip(rows, prompt[1:], strict=True):
        logprobs = torch.log_softmax(row, dim=-1)
        order = sorted(range(len(row)), key=lambda one: -float(row[one]))[:top]
        rank = 1 + int((row > row[token]).sum())
        found.append(PromptTokenLogprobs(float(logprobs[token]), rank, tuple((i, float(logprobs[i])) for i in order)))
    return found


def report_of(items: list[StepItem], name: str = "r") -> PromptReport:
    """Return the report of a request. Checks that only its first item has one."""
    mine = [item for item in items if item.request_id == name]
    assert [item.report is not None for item in mine] == [True] + [False] * (len(mine) - 1)
    report = mine[0].report
    assert report is not None
    return report


def check(report: PromptReport, prompt: tuple[int, ...], top: int) -> None:
    assert report.token_ids == prompt
    assert report.records is not None
    found = list(read_prompt_records(report.records, len(prompt) - 1))
    wanted = expected(prompt, top)
    assert [one.rank for one in found] == [one.rank for one in wanted]
    assert [[i for i, _ in one.top] for one in found] == [[i for i, _ in one.top] for one in wanted]
    np.testing.assert_allclose([one.logprob for one in found], [one.logprob for one in wanted], atol=1e-5)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose([value for _, value in one.top], [value for _, value in other.top], atol=1e-5)


def scored(prompt: tuple[int, ...] = PROMPT, top: int = 3, name: str = "r", **params: Any) -> Any:
    return request(name, prompt, prompt_logprobs=top, returns_prompt=True, ignore_eos=True, **params)


@pytest.fixture(params=["waiting", "ahead", "graphs"])
def make(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    runner = {"waiting": Runner, "ahead": DeviceRunner, "graphs": graphed}[request.param]
    return partial(make_engine, branches=True, runner=runner)


@pytest.mark.parametrize("tokens", [8, 16, 64])
@pytest.mark.parametrize("top", [0, 3])
def test_scores_are_those_of_the_model_in_chunks_of_any_size(
    make: Callable[..., Engine], tokens: int, top: int
) -> None:
    engine = make(max_num_batched_tokens=tokens)
    engine.add(scored(top=top))
    items = run(engine)
    check(report_of(items), PROMPT, top)
    plain = make(max_num_batched_tokens=tokens)
    plain.add(request("r", PROMPT, ignore_eos=True))
    assert text(items, "r") == text(run(plain), "r")


@pytest.mark.parametrize("n", [1, 3])
def test_without_tokens_to_generate_the_request_ends_with_its_prompt(make: Callable[..., Engine], n: int) -> None:
    engine = make()
    engine.add(request("other", (5, 6), max_tokens=20, ignore_eos=True))
    engine.add(scored(max_tokens=0, n=n))
    items = run(engine)
    assert [(item.deltas, item.outcome) for item in items if item.request_id == "r"] == [((), Outcome("length"))]
    check(report_of(items), PROMPT, 3)
    assert len(text(items, "other")) == 20


def test_a_prompt_of_one_token_has_no_records(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add(scored((9,), max_tokens=0))
    assert report_of(run(engine)) == PromptReport(0, b"\x09\0\0\0", b"")


def test_a_step_scores_a_bounded_number_of_positions(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other prompts use the rest of the token budget meanwhile."""
    monkeypatch.setattr(scheduler, "MAX_SCORED_POSITIONS", 5)
    engine = make(max_num_batched_tokens=32, num_blocks=128)
    seen: list[tuple[int, int]] = []
    engine.observer = lambda step: seen.append((step.num_scored, step.num_prefill_tokens))
    for name in ("r", "s"):
        engine.add(scored(name=name, max_tokens=0))
    engine.add(request("other", PROMPT, max_tokens=3, ignore_eos=True))
    items = run(engine)
    for name in ("r", "s"):
        check(report_of(items, name), PROMPT, 3)
    assert max(positions for positions, _ in seen) == 5
    assert max(tokens for _, tokens in seen) > 5


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_preempted_prompt_keeps_its_scores(make: Callable[..., Engine], mode: str, n: int) -> None:
    """Requests of a higher class preempt it while it is computed; no position is scored twice."""
    engine = make(num_blocks=18, max_num_batched_tokens=8, preemption=mode, num_host_blocks=18, prefix_caching=True)
    positions: list[int] = []
    engine.observer = lambda step: positions.append(step.num_scored)
    engine.add(scored(n=n), priority=2)
    items = steps(engine, 2)
    for at in range(3):
        engine.add(request(f"high {at}", (at, 50, *range(30)), max_tokens=4, ignore_eos=True), priority=0)
    items += run(engine)
    counters = engine.groups.counters
    assert counters.swapped if mode == "swap" else counters.recomputed
    check(report_of(items), PROMPT, 3)
    assert sum(positions) == len(PROMPT) - 1


def test_a_cached_prefix_is_not_used_before_it_is_scored(make: Callable[..., Engine]) -> None:
    engine = make(prefix_caching=True)
    engine.add(request("first", PROMPT))
    run(engine)
    engine.add(scored(max_tokens=0))
    report = report_of(run(engine))
    check(report, PROMPT, 3)
    assert report.cached_tokens == 0
    engine.add(request("last", PROMPT))
    assert report_of(run(engine), "last").cached_tokens == len(PROMPT) // 4 * 4

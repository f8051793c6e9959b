"""Reasoning ends after its budget, and answers that repeat themselves end, wherever and however they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from quire.shared.protocol.messages import Delta, GenerationRequest, StepItem
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.features.repetition import repeats_itself
from quire.worker.engine.features.thinking import BoundedReasoning
from quire.worker.engine.sampler import token_mask
from tests.support.mock_model import (
    VOCAB,
    alone,
    continuation,
    final,
    make_engine,
    next_token,
    request,
    run,
    text,
)

# Tokens that these answers do not have by themselves.
BEGIN, END, AFTER = VOCAB - 1, VOCAB - 2, VOCAB - 3
PROMPT = (3, 1, 4, 1, 5)
AHEAD = partial(DeviceRunner, graph_buckets=[])


def thinks(name: str, budget: int, prompt: tuple[int, ...] = PROMPT, **params: Any) -> GenerationRequest:
    """A request whose prompt ends inside the reasoning, unless thinking_start is among its parameters."""
    bounds = {"thinking_token_budget": budget, "thinking_end": (END, AFTER), "max_tokens": 24, "ignore_eos": True}
    return request(name, prompt, **bounds | params)


def expected(budget: int, prompt: tuple[int, ...] = PROMPT, count: int = 24) -> list[int]:
    """The greedy answer with the reasoning that ends after its budget."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        at = len(tokens) - len(prompt) - budget
        tokens.append((END, AFTER)[at] if 0 <= at < 2 else next_token(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("runner", [None, AHEAD], ids=["waits", "runs ahead"])
def test_reasoning_ends_after_its_budget_in_any_batch(runner: Any) -> None:
    """The engine is so small that groups are preempted. Requests without a budget run beside the others."""
    options = {"runner": runner} if runner else {}
    engine = make_engine(num_blocks=24, **options)
    prompts = {str(i): (*PROMPT, i) for i in range(8)}
    for i, (name, prompt) in enumerate(prompts.items()):
        free = request(name, prompt, max_tokens=24, ignore_eos=True)
        engine.add(thinks(name, i, prompt) if i % 3 else free)
    items = run(engine)
    assert engine.groups.num_preemptions > 0
    for i, (name, prompt) in enumerate(prompts.items()):
        whole = expected(i, prompt) if i % 3 else continuation(prompt, 24, ignore_eos=True)
        assert text(items, name) == whole


def test_reasoning_that_ends_earlier_is_left_alone() -> None:
    """The model ends its reasoning with the fourth token: the budget of ten changes nothing."""
    natural = continuation(PROMPT, 24, ignore_eos=True)
    found = alone(thinks("r", 10, thinking_end=(natural[3], AFTER)))
    assert [*found[0].token_ids] == natural


def test_the_budget_counts_from_the_marker_on_if_the_answer_begins_with_it() -> None:
    natural = continuation(PROMPT, 24, ignore_eos=True)
    found = [*alone(thinks("r", 3, thinking_start=(natural[1], natural[2])))[0].token_ids]
    assert found[:8] == [*natural[:6], END, AFTER]
    # Without the marker at its beginning an answer has no reasoning.
    assert [*alone(thinks("r", 3, thinking_start=(natural[7],)))[0].token_ids] == natural


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5, "n": 2}], ids=["greedy", "drawn"])
def test_an_answer_that_continues_elsewhere_ends_its_reasoning_at_the_same_token(sampling: dict[str, Any]) -> None:
    asked = thinks("r", 5, **sampling)
    engine = make_engine(branches=True)
    engine.add(asked)
    items = run(engine)
    whole = final(items, "r")
    for delta in whole:
        assert delta.token_ids[5:7] == (END, AFTER)
    for kept in range(len(items)):
        other = make_engine(branches=True)
        other.add(asked, earlier=items[:kept])
        assert final([*items[:kept], *run(other)], "r") == whole


class WholeCharacters:
    """A grammar that allows the end of the reasoning after an even number of tokens alone."""

    error = None

    def __init__(self) -> None:
        self.count = 0

    def allowed(self) -> np.ndarray:
        return token_mask([token for token in range(VOCAB) if token != END or self.count % 2 == 0], VOCAB)

    def forced(self) -> list[int]:
        return []

    def consume(self, token_ids: Sequence[int]) -> None:
        self.count += len(token_ids)


def test_the_reasoning_ends_where_its_grammar_allows_it() -> None:
    """A budget may be used up in the middle of a character."""
    sampling = thinks("r", 5).sampling
    state, written = BoundedReasoning(sampling, VOCAB, WholeCharacters(), ()), [7] * 5
    state.consume(written)
    mask = state.allowed()
    assert mask is not None
    assert not mask[END // 32] >> (END % 32) & 1
    for token in (7, END, AFTER):
        assert token == 7 or (state.allowed() == token_mask([token], VOCAB)).all()
        state.consume([token])
        written.append(token)
        again = BoundedReasoning(sampling, VOCAB, grammar := WholeCharacters(), written)
        grammar.consume(written)
        assert (again.allowed() == state.allowed()).all()
    assert (state.allowed() == WholeCharacters().allowed()).all()


def test_a_marker_is_written_although_the_call_bans_it() -> None:
    found = alone(thinks("r", 2, logit_bias=((END, -100.0),)))
    assert found[0].token_ids[2:4] == (END, AFTER)


@pytest.mark.parametrize(
    ("output", "limits", "repeats"),
    [
        ([1, 2, 1, 2, 1, 2], (1, 4, 3), True),
        ([9, 1, 2, 1, 2, 1, 2], (1, 4, 3), True),
        ([1, 2, 1, 2, 1, 2], (1, 1, 3), False),
        ([1, 2, 1, 2, 1, 2], (3, 4, 3), False),
        ([1, 2, 1, 2], (1, 4, 3), False),
        ([2, 1, 2, 1, 2], (1, 4, 3), False),
        ([7, 7, 7], (1, 4, 3), True),
        ([7, 7, 8, 7, 7, 8], (1, 4, 2), True),
        ([1, 2, 3, 1, 2, 3, 4], (1, 4, 2), False),
    ],
)
def test_repetition_is_a_part_that_follows_itself(
    output: list[int], limits: tuple[int, int, int], repeats: bool
) -> None:
    assert repeats_itself(output, *limits) is repeats


def ended(items: list[StepItem], name: str) -> Delta:
    [delta] = final(items, name)
    return delta


@pytest.mark.parametrize("runner", [None, AHEAD], ids=["waits", "runs ahead"])
def test_an_answer_that_repeats_itself_ends_with_a_reason_of_its_own(runner: Any) -> None:
    """A bias makes one token certain: the answer repeats it. Requests beside it go on."""
    options = {"runner": runner} if runner else {}
    engine = make_engine(**options)
    loops = {"logit_bias": ((9, 100.0),), "max_tokens": 20, "ignore_eos": True}
    engine.add(request("loops", PROMPT, repetition_detection=(1, 3, 4), **loops))
    engine.add(request("free", PROMPT, **loops))
    engine.add(request("other", PROMPT, repetition_detection=(1, 3, 4), max_tokens=20, ignore_eos=True))
    items = run(engine)
    assert ended(items, "loops")[1:3] == ((9, 9, 9, 9), "repetition")
    assert ended(items, "free")[1:3] == ((9,) * 20, "length")
    assert ended(items, "other").finish_reason == "length"
    [end] = [item.outcome for item in items if item.request_id == "loops" and item.outcome]
    assert end.name == "repetition"
    other = make_engine()
    first = next(item for item in items if item.request_id == "loops")
    asked = request("loops", PROMPT, repetition_detection=(1, 3, 4), **loops)
    other.add(asked, earlier=[first])
    assert ended([first, *run(other)], "loops") == ended(items, "loops")

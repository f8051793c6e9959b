"""`allowed_token_ids`: an output has no other tokens, with any other parameter and after any other attempt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from quire.shared.protocol.logprobs import read_records
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.runner import Runner
from quire.worker.engine.sampler import restrict, token_mask
from tests.support.mock_model import (
    EOS,
    START,
    VOCAB,
    MockModel,
    MockOps,
    advance,
    final,
    make_engine,
    request,
    run,
    steps,
    text,
)

PROMPT = (3, 1, 4)
ALLOWED = (5, 31, 32, 64, 96)
LENGTH = 12


@pytest.fixture(params=[Runner, DeviceRunner])
def make(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    return partial(make_engine, branches=True, runner=request.param)


def asked(allowed: tuple[int, ...] = ALLOWED, **params: Any) -> Any:
    return request("a", PROMPT, **{"max_tokens": LENGTH, "allowed_token_ids": allowed} | params)


def greedy(allowed: tuple[int, ...]) -> list[int]:
    """Return the most probable allowed tokens by the mock model's definition."""
    model, state, found = MockModel(branches=True), START, list[int]()
    for token in PROMPT:
        state = advance(state, token)
    while len(found) < LENGTH and EOS not in found:
        row = model._logits([state])[0]
        found.append(max(sorted(allowed), key=lambda token: float(row[token])))
        state = advance(state, found[-1])
    return found


def output_of(engine: Engine, one: Any, choice: int = 0) -> list[int]:
    engine.add(one)
    return text(run(engine), "a", choice)


@pytest.mark.parametrize("allowed", [ALLOWED, (7,), (*ALLOWED, EOS), tuple(range(VOCAB))])
def test_the_output_is_the_most_probable_one_of_the_allowed_tokens(
    make: Callable[..., Engine], allowed: tuple[int, ...]
) -> None:
    assert output_of(make(), asked(allowed)) == greedy(allowed)


@pytest.mark.parametrize("params", [{}, {"n": 3}, {"repetition_penalty": 1.3, "presence_penalty": 1.0}, {"best_of": 3}])
def test_drawn_tokens_are_allowed_ones(make: Callable[..., Engine], params: dict[str, Any]) -> None:
    engine = make_engine(model=MockModel(Drawing(), branches=True))
    engine.add(asked(temperature=2.0, seed=5, **params))
    items = run(engine)
    for choice in range(params.get("n", 1)):
        found = text(items, "a", choice)
        assert len(found) == LENGTH
        assert set(found) <= set(ALLOWED)
        assert len(set(found)) > 1


class Drawing(MockOps):
    """Sampling operations that draw from all tokens by their probabilities."""

    def sample(self, logits: torch.Tensor, temperature: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any) -> Any:
        shares = torch.softmax(logits / temperature[:, None], dim=-1).cumsum(dim=-1)
        return (shares < uniform[:, None]).sum(dim=-1).to(torch.int32)


def test_other_requests_of_the_batch_are_free(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add(asked())
    engine.add(request("b", PROMPT, max_tokens=LENGTH, ignore_eos=True))
    items = run(engine)
    assert text(items, "a") == greedy(ALLOWED)
    assert not set(text(items, "b")) <= set(ALLOWED)


def test_another_attempt_keeps_the_rule(make: Callable[..., Engine]) -> None:
    first = make()
    first.add(asked())
    earlier = steps(first, 6)
    other = make()
    other.add(asked(), earlier=tuple(earlier))
    assert text(earlier + run(other), "a") == greedy(ALLOWED)


def test_log_probabilities_are_those_of_the_model(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add(asked(logprobs=True, top_logprobs=1))
    items = run(engine)
    [delta] = final(items, "a")
    records = b"".join(one.logprobs or b"" for item in items for one in item.deltas)
    tops = [one.top[0][0] for one in read_records(records, len(delta.token_ids))]
    assert any(top not in ALLOWED for top in tops)


def test_a_token_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(RequestRefused, match="outside the vocabulary"):
        make_engine().add(asked((VOCAB,)))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97])
def test_a_mask_has_a_bit_for_each_token(vocab_size: int) -> None:
    allowed = {0, vocab_size // 2, vocab_size - 1}
    logits = torch.zeros(vocab_size)
    restrict(logits[None], {0: token_mask(allowed, vocab_size)})
    assert set(np.flatnonzero(logits.numpy() == 0).tolist()) == allowed

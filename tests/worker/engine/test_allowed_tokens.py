"""`allowed_token_ids`: an output has no other tokens, and those that it has are the most probable ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.runner import Runner
from quire.worker.engine.sampler import restrict, token_mask
from tests.support.mock_model import EOS, START, VOCAB, MockModel, advance, make_engine, request, run, text

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
        row = model.logits_of([state])[0]
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


def test_a_token_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(RequestRefused, match="outside the vocabulary"):
        make_engine().add(asked((VOCAB,)))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97])
def test_a_mask_has_a_bit_for_each_token(vocab_size: int) -> None:
    allowed = {0, vocab_size // 2, vocab_size - 1}
    logits = torch.zeros(vocab_size)
    restrict(logits[None], {0: token_mask(allowed, vocab_size)})
    assert set(np.flatnonzero(logits.numpy() == 0).tolist()) == allowed

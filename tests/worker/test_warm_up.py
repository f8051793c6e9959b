"""The warm-up runs prefill and decode steps, and leaves an idle engine without requests."""

from __future__ import annotations

import pytest

from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.warm_up import warm_up
from tests.support.mock_model import EOS, MockModel


@pytest.mark.parametrize(("max_model_len", "max_num_seqs"), [(64, 8), (64, 1), (3, 8)])
def test_the_engine_is_idle_afterwards(max_model_len: int, max_num_seqs: int) -> None:
    engine = Engine(MockModel(), EngineLimits(16, 16, max_num_seqs, 32, max_model_len), (EOS,), None)
    warm_up(engine)
    assert engine.num_prefill_tokens > 0
    assert engine.num_decode_tokens > 0
    assert not engine.has_work
    assert engine.scheduler.blocks.num_cached == 0, "the prompt fills no block, so nothing stays in the prefix cache"


def test_a_context_of_two_tokens_is_too_short_for_it() -> None:
    engine = Engine(MockModel(), EngineLimits(16, 8, 8, 32, 2), (EOS,), None)
    warm_up(engine)
    assert engine.num_steps == 0

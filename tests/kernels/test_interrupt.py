"""A request of another thread ends the layers of a step early, and the same step can be computed again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire import kernels
from quire.kernels import Interrupt, ReferenceOps, StepInterrupted
from tests.support.kernels.stacks import HIDDEN, QUERIES, make_stack, random, step


def test_a_flag_is_set_and_cleared() -> None:
    interrupt = Interrupt()
    assert not interrupt.is_requested
    interrupt.check()
    interrupt.request()
    assert interrupt.is_requested
    with pytest.raises(StepInterrupted):
        interrupt.check()
    interrupt.clear()
    interrupt.check()


def test_a_step_that_was_interrupted_gives_the_same_output_when_it_is_computed_again(cpu_ops: kernels.Ops) -> None:
    check_it_can_be_computed_again(cpu_ops)


def test_the_definition_in_torch_can_be_interrupted_too() -> None:
    check_it_can_be_computed_again(ReferenceOps("cpu", torch.float32))


def check_it_can_be_computed_again(ops: kernels.Ops) -> None:
    stack, caches = make_stack(ops, [0, 20])
    residual = random(sum(QUERIES), HIDDEN, dtype=ops.dtype)
    arguments = step() | {"rows": torch.tensor([0, 35])}
    kept = [cache.clone() for pair in caches for cache in pair]
    expected = ops.decoder_layers(residual.clone(), stack, **arguments)
    for cache, old in zip((cache for pair in caches for cache in pair), kept, strict=True):
        cache.copy_(old)
    interrupt = Interrupt()
    interrupt.request()
    with pytest.raises(StepInterrupted):
        ops.decoder_layers(residual.clone(), stack, **arguments, interrupt=interrupt)
    interrupt.clear()
    assert torch.equal(ops.decoder_layers(residual.clone(), stack, **arguments, interrupt=interrupt), expected)


def test_it_ends_between_two_layers_while_another_thread_computes(cpu_ops: kernels.Ops) -> None:
    """The request arrives while a step runs: its first layer has written to the cache, and its last one never does."""
    stack, caches = make_stack(cpu_ops, [0] * 200)
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    arguments = step() | {"rows": torch.tensor([0])}
    interrupt, first, last = Interrupt(), caches[0][0], caches[-1][0]

    def is_interrupted() -> bool:
        try:
            cpu_ops.decoder_layers(residual.clone(), stack, **arguments, interrupt=interrupt)
        except StepInterrupted:
            return True
        return False

    with ThreadPoolExecutor(1) as thread:
        for _ in range(20):  # a busy machine may leave this thread without time while a whole step is computed
            interrupt.clear()
            first.zero_()
            last.zero_()
            outcome = thread.submit(is_interrupted)
            while not first.any() and not outcome.done():
                pass
            interrupt.request()
            if outcome.result(60):
                break
    assert first.any()
    assert not last.any()

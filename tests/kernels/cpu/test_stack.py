"""All layers in one call of the C++ library: ranks, and invalid ids."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.kernels.cpu.ranks import CpuRanks, GivenUp, shared_file
from tests.support.kernels.stacks import (
    BLOCK,
    HEADS,
    HIDDEN,
    KV_HEADS,
    QUERIES,
    make_stack,
    random,
    stack_arguments,
    step,
)


def test_a_sum_that_is_given_up_gives_no_output(cpu_ops):
    """The last all-reduce of a step, after which no other one could fail."""
    file = shared_file(2)
    ranks = [CpuRanks(rank, 2, file) for rank in range(2)]
    os.close(file)
    made, final_norm, caches, cos_sin = stack_arguments(cpu_ops, [0])
    stack = cpu_ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2, ranks[0])
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    arguments = step() | {"rows": torch.tensor([35])}
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(cpu_ops.decoder_layers, residual, stack, **arguments)
        ranks[1].all_reduce(torch.zeros(1, HIDDEN, dtype=cpu_ops.dtype))
        ranks[1].give_up()
        with pytest.raises(GivenUp):
            output.result(30)


def test_the_last_token_of_a_cached_prompt_can_be_computed_alone(cpu_ops):
    stack, caches = make_stack(cpu_ops, [0, 20])
    count, table = 45, torch.tensor([[7, 2, 11]], dtype=torch.int32)
    at = torch.arange(count)
    residual = random(count, HIDDEN, dtype=cpu_ops.dtype)

    def compute(tokens: slice, slots: torch.Tensor) -> torch.Tensor:
        queries = len(at[tokens])
        return cpu_ops.decoder_layers(
            residual[tokens].clone(),
            stack,
            at[tokens].int(),
            slots[tokens].contiguous(),
            table,
            torch.tensor([count], dtype=torch.int32),
            torch.tensor([0, queries], dtype=torch.int32),
            torch.tensor([queries - 1]),
        )

    slots = table[0, at // BLOCK] * BLOCK + at % BLOCK
    expected = compute(slice(None), slots)
    kept = [cache.clone() for pair in caches for cache in pair]
    assert torch.equal(compute(slice(-1, None), torch.full_like(slots, -1)), expected)
    assert all(torch.equal(cache, old) for cache, old in zip((c for pair in caches for c in pair), kept, strict=True))


def test_no_tokens_give_no_rows(cpu_ops):
    made, final_norm, caches, cos_sin = stack_arguments(cpu_ops, [0])
    stack = cpu_ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
    none = torch.zeros(0, dtype=torch.int32)
    empty = torch.zeros(0, HIDDEN, dtype=cpu_ops.dtype)
    start = torch.zeros(1, dtype=torch.int32)
    out = cpu_ops.decoder_layers(
        empty, stack, none, none, torch.zeros(0, 4, dtype=torch.int32), none, start, none.long()
    )
    assert out.shape == (0, HIDDEN)


def test_bad_ids_are_refused(cpu_ops):
    made, final_norm, caches, cos_sin = stack_arguments(cpu_ops, [0, 0])
    stack = cpu_ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
    good = step() | {"rows": torch.tensor([35])}
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    for name, index, value, message in [
        ("positions", 3, 160, "token 3: position 160 of 160"),
        ("slot_mapping", 4, 20 * BLOCK, "token 4"),
        ("block_tables", (1, 1), 20, "sequence 1"),
        ("seq_lens", 2, 29, "sequence 2"),
        ("rows", 0, 36, r"rows\[0\]"),
    ]:
        bad = good | {name: good[name].clone()}
        bad[name][index] = value
        with pytest.raises(IndexError, match=message):
            cpu_ops.decoder_layers(residual.clone(), stack, **bad)
    with pytest.raises(TypeError, match="rows"):
        cpu_ops.decoder_layers(residual.clone(), stack, **good | {"rows": torch.tensor([35]).int()})
    with pytest.raises(ValueError, match="residual has shape"):
        cpu_ops.decoder_layers(residual[:, 1:].contiguous(), stack, **good)

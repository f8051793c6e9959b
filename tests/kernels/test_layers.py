"""A whole stack of layers in one call is the single operations, and can be interrupted between two layers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire import kernels
from quire.kernels import Interrupt, ReferenceOps, StepInterrupted, layers
from quire.kernels.cpu.ranks import CpuRanks, GivenUp, shared_file
from quire.kernels.ops import AddedRows
from quire.kernels.stack import Stack
from tests.support.kernels.stacks import (
    BLOCK,
    HEADS,
    HIDDEN,
    INPUT_WIDTH,
    KV_HEADS,
    QUERIES,
    add_extras,
    alone_and_added_up,
    gemma4_arguments,
    image_ends,
    make_caches,
    make_stack,
    random,
    stack_arguments,
    step,
)

# --- a whole stack of layers in one call is the single operations, one after the other --------------------------------


@pytest.mark.parametrize(("norms", "biases"), [(False, False), (True, True)])
@pytest.mark.parametrize("windows", [[0], [0, 20, 20, 0]], ids=str)
@pytest.mark.parametrize("rows", [[0, 5, 35], [], [3, 3], list(range(36))], ids=["last", "none", "twice", "all"])
def test_one_call_equals_single_operations(cpu_ops, norms, biases, windows, rows):
    made, final_norm, caches, cos_sin = stack_arguments(cpu_ops, windows, norms, biases)
    arguments = step() | {"rows": torch.tensor(rows, dtype=torch.int64)}
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    rest = cos_sin, HEADS, KV_HEADS, 1e-5, 0.2
    expected = layers.run_layers(cpu_ops, residual.clone(), Stack(caches, made, final_norm, *rest), **arguments)
    again = make_caches(cpu_ops, len(windows))
    stack = cpu_ops.stack_layers(made, final_norm, again, *rest)
    actual = cpu_ops.decoder_layers(residual.clone(), stack, **arguments)
    assert torch.equal(actual, expected)
    for one, other in zip(caches, again, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("rows", [[0, 5, 35], list(range(36))], ids=["last", "all"])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_one_call_equals_single_operations_with_experts_sinks_and_more_norms(cpu_ops, rows, softcap):
    made, final_norm, caches, cos_sin = stack_arguments(cpu_ops, [0, 20, 0], norms=True)
    add_extras(cpu_ops, made)
    arguments = step() | {"rows": torch.tensor(rows, dtype=torch.int64)}
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    rest = cos_sin, HEADS, KV_HEADS, 1e-5, 0.2, None, softcap
    expected = layers.run_layers(cpu_ops, residual.clone(), Stack(caches, made, final_norm, *rest), **arguments)
    again = make_caches(cpu_ops, 3)
    stack = cpu_ops.stack_layers(made, final_norm, again, *rest)
    assert torch.equal(cpu_ops.decoder_layers(residual.clone(), stack, **arguments), expected)
    for one, other in zip(caches, again, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_one_call_equals_single_operations_with_images(cpu_ops):
    """Only some layers see all of an image, of those with the same window, too."""
    made, final_norm, caches, cos_sin = stack_arguments(cpu_ops, [0, 20, 20, 0])
    for layer, uses in zip(made, [True, False, True, False], strict=True):
        layer.uses_key_ends = uses
    arguments = step() | {"rows": torch.arange(sum(QUERIES)), "key_ends": image_ends()}
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    rest = cos_sin, HEADS, KV_HEADS, 1e-5, 0.2
    stack = cpu_ops.stack_layers(made, final_norm, caches, *rest)
    expected = layers.run_layers(cpu_ops, residual.clone(), Stack(caches, made, final_norm, *rest), **arguments)
    assert torch.equal(cpu_ops.decoder_layers(residual.clone(), stack, **arguments), expected)
    assert not torch.equal(cpu_ops.decoder_layers(residual.clone(), stack, **arguments | {"key_ends": None}), expected)


LAST, ALL = [0, 5, 35], list(range(36))


@pytest.mark.parametrize(
    ("num_shared", "rows"),
    [
        *((2, rows) for rows in (LAST, [], [3, 3], ALL, [4, 5, 34, 35], [0, 5, 34], [35, 5], [35])),
        *((num_shared, rows) for num_shared in (0, 4) for rows in (LAST, ALL)),
    ],
    ids=str,
)
def test_one_call_equals_single_operations_for_layers_of_several_shapes(cpu_ops, rows, num_shared):
    """Layers that share keys and values compute the wanted rows alone, if these are the last of each sequence."""
    made, final_norm, caches, cos_sin = gemma4_arguments(cpu_ops, num_shared)
    before = [[part.clone() for part in pair] for pair in caches]
    arguments = step() | {"rows": torch.tensor(rows, dtype=torch.int64)}
    arguments["layer_inputs"] = random(sum(QUERIES), 6, INPUT_WIDTH, dtype=cpu_ops.dtype) * 4
    arguments["key_ends"] = image_ends() if num_shared == 2 else None
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    rest = cos_sin, HEADS, KV_HEADS, 1e-5, 0.2
    expected = layers.run_layers(cpu_ops, residual.clone(), Stack(caches, made, final_norm, *rest), **arguments)
    written = [[part.clone() for part in pair] for pair in caches]
    for pair, old in zip(caches, before, strict=True):
        for part, values in zip(pair, old, strict=True):
            part.copy_(values)
    stack = cpu_ops.stack_layers(made, final_norm, caches, *rest)
    actual = cpu_ops.decoder_layers(residual.clone(), stack, **arguments)
    # Torch and the C++ kernels compute GELU of the gates of inputs in another way.
    torch.testing.assert_close(actual.float(), expected.float(), **near(cpu_ops.dtype))
    for pair, wanted in zip(caches, written, strict=True):
        for part, values in zip(pair, wanted, strict=True):
            torch.testing.assert_close(part.float(), values.float(), **near(cpu_ops.dtype))
    # A row has the same bits, whatever other rows are wanted.
    every = arguments | {"rows": torch.arange(sum(QUERIES))}
    assert torch.equal(cpu_ops.decoder_layers(residual.clone(), stack, **every)[rows], actual)


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.1}


def test_rows_that_are_added_to_the_first_layers_change_their_sequences_alone(ops):
    """Added zeros change no bit, and what is added to the last two sequences changes no bit of the first."""
    made, final_norm, caches, cos_sin = stack_arguments(ops, [0, 20, 0])
    stack = ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
    arguments = step() | {"rows": torch.arange(sum(QUERIES))}
    residual = random(sum(QUERIES), HIDDEN, dtype=ops.dtype)
    plain = ops.decoder_layers(residual.clone(), stack, **arguments)
    rows = torch.tensor([QUERIES[0], sum(QUERIES) - 1])
    for scale in (0.0, 1.0):
        values = [random(2, HIDDEN, dtype=ops.dtype) * scale for _ in range(2)]
        actual = ops.decoder_layers(residual.clone(), stack, **arguments, added=AddedRows(rows, values))
        assert torch.equal(actual[: QUERIES[0]], plain[: QUERIES[0]])
        assert (actual == plain).all(dim=1)[rows].tolist() == [not scale] * 2


class Plainly:
    """Ranks that the kernels do not know: they add up in one operation of its own."""

    def __init__(self, ranks: CpuRanks) -> None:
        self.rank, self.size, self.all_reduce = ranks.rank, ranks.size, ranks.all_reduce


@pytest.mark.parametrize("rows", [[0, 5, 35], [], list(range(36))], ids=["last", "none", "all"])
def test_one_call_adds_up_over_ranks_as_single_operations_do(cpu_ops, rows):
    file = shared_file(2)
    ranks = [CpuRanks(rank, 2, file) for rank in range(2)]
    os.close(file)
    parts = [stack_arguments(cpu_ops, [0, 20], True, True) for _ in ranks]
    arguments = step() | {"rows": torch.tensor(rows, dtype=torch.int64)}
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    norm, cos_sin = parts[0][1], parts[0][3]

    def compute(rank: CpuRanks, as_ranks: type) -> torch.Tensor:
        caches = make_caches(cpu_ops, 2)
        stack = cpu_ops.stack_layers(
            parts[rank.rank][0], norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2, as_ranks(rank)
        )
        return cpu_ops.decoder_layers(residual.clone(), stack, **arguments)

    with ThreadPoolExecutor(2) as pool:
        single = [one.result(30) for one in [pool.submit(compute, rank, Plainly) for rank in ranks]]
        whole = [one.result(30) for one in [pool.submit(compute, rank, lambda rank: rank) for rank in ranks]]
    assert torch.equal(whole[0], single[0])
    assert torch.equal(whole[1], single[1])
    ranks[0].give_up()
    if rows:
        with pytest.raises(GivenUp):
            compute(ranks[1], lambda rank: rank)


def test_products_are_added_up_over_ranks(ops):
    alone, added_up = alone_and_added_up(ops)
    assert torch.equal(added_up, alone)


@pytest.mark.parametrize("unkept", [[35], [0, 5, 35], list(range(36))], ids=["one", "last", "all"])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_tokens_without_a_slot_write_nothing_and_see_what_the_cache_holds(ops, unkept, integer):
    stack, caches = make_stack(ops, [0, 20, 0])
    arguments = step() | {"rows": torch.arange(sum(QUERIES))}
    tables = torch.zeros(3, 10, dtype=torch.int32)  # no block is shared, so a second run computes the same again
    for table, blocks in zip(tables, torch.randperm(20).int().split([3, 2, 10, 5]), strict=False):
        table[: len(blocks)] = blocks
    arguments["block_tables"] = tables
    at, s = arguments["positions"], torch.arange(3).repeat_interleave(torch.tensor(QUERIES))
    arguments["slot_mapping"] = (tables[s, at // BLOCK] * BLOCK + at % BLOCK).to(integer)
    residual = random(sum(QUERIES), HIDDEN, dtype=ops.dtype)
    expected = ops.decoder_layers(residual.clone(), stack, **arguments)
    kept = [cache.clone() for pair in caches for cache in pair]

    arguments["slot_mapping"][unkept] = -1
    assert torch.equal(ops.decoder_layers(residual.clone(), stack, **arguments), expected)
    assert all(torch.equal(cache, old) for cache, old in zip((c for pair in caches for c in pair), kept, strict=True))

    # Other inputs compute other keys and values, which must not reach the cache either.
    arguments["slot_mapping"][:] = -1
    ops.decoder_layers(residual.flip(0).clone(), stack, **arguments)
    assert all(torch.equal(cache, old) for cache, old in zip((c for pair in caches for c in pair), kept, strict=True))


def test_the_reference_runs_the_same_operations():
    ops = kernels.ReferenceOps()
    made, final_norm, caches, cos_sin = stack_arguments(ops, [0, 20])
    arguments = step() | {"rows": torch.tensor([0, 35])}
    residual = random(sum(QUERIES), HIDDEN, dtype=ops.dtype)
    stack = ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
    actual = ops.decoder_layers(residual.clone(), stack, **arguments)
    assert torch.equal(actual, layers.run_layers(ops, residual, stack, **arguments))


# --- layers and caches that do not fit together are refused -----------------------------------------------------------


def test_layers_that_do_not_fit_are_refused(ops):
    made, final_norm, caches, cos_sin = stack_arguments(ops, [0, 0])
    rest = HEADS, KV_HEADS, 1e-5, 0.2
    with pytest.raises(ValueError, match="2 layers and 1 caches"):
        ops.stack_layers(made, final_norm, caches[:1], cos_sin, *rest)
    with pytest.raises(ValueError, match="final_norm"):
        ops.stack_layers(made, final_norm[1:], caches, cos_sin, *rest)
    made[1].o, made[1].down = made[1].down, made[1].o
    with pytest.raises(ValueError, match="o of layer 1"):
        ops.stack_layers(made, final_norm, caches, cos_sin, *rest)


def test_layers_of_several_shapes_that_do_not_fit_are_refused(ops):
    made, final_norm, caches, cos_sin = gemma4_arguments(ops)
    rest = cos_sin, HEADS, KV_HEADS, 1e-5, 0.2
    stack = ops.stack_layers(made, final_norm, caches, *rest)
    arguments = step() | {"rows": torch.tensor([0])}
    residual = random(len(arguments["positions"]), HIDDEN, dtype=ops.dtype)
    with pytest.raises(ValueError, match="layer_inputs is missing"):
        ops.decoder_layers(residual, stack, **arguments)
    with pytest.raises(ValueError, match="layer_inputs has shape"):
        ops.decoder_layers(residual, stack, **arguments, layer_inputs=residual)
    with pytest.raises(ValueError, match="q_norm of layer 0"):
        ops.stack_layers(made, final_norm, [caches[1], *caches[1:]], cos_sin, HEADS, 1, 1e-5, 0.2)
    smaller = ops.alloc_kv_cache(3, *caches[1][0].shape[1:])
    with pytest.raises(ValueError, match="the caches of layer 1 do not have the blocks"):
        ops.stack_layers(made, final_norm, [caches[0], smaller, *caches[2:]], *rest)
    made[1].moe = None
    with pytest.raises(ValueError, match="layer 1 has norms of experts, and no experts"):
        ops.stack_layers(made, final_norm, caches, *rest)
    made[0].shares_kv = True
    with pytest.raises(ValueError, match="layer 0 has no earlier layer"):
        ops.stack_layers(made, final_norm, caches, *rest)


# --- a request of another thread ends the layers of a step early, and the same step can be computed again -------------


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

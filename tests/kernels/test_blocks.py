"""Copies of blocks within all caches of a stack, to host memory and back."""

from pathlib import Path

import pytest
import torch

from quire import kernels
from tests.support.kernels.implementations import ON_CUDA
from tests.support.kernels.stacks import BLOCKS, make_cache_stack

SRC, DST = [3, 19, 0, 3], [4, 1, 18, 7]  # one block may be copied to several


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def plain(ops: kernels.Ops, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """[layers, 2, blocks, H_kv, block_size, D]"""
    return torch.stack([torch.stack(ops.plain_kv_cache(*pair)) for pair in caches])


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=1e9), b.nan_to_num(nan=1e9))


@pytest.fixture(params=[1, 2])
def some_threads(request: pytest.FixtureRequest, threads) -> None:
    if "triton" not in request.node.name:  # a GPU has none, and a machine with a GPU needs no C++ kernels
        threads(request.param)


@pytest.mark.usefixtures("some_threads")
@pytest.mark.parametrize("count", [0, 1, 4])
def test_copies_are_made_in_every_layer_and_nothing_else_changes(ops, count):
    stack, caches = make_cache_stack(ops, 3)
    for cache in (cache for pair in caches for cache in pair):
        cache[[b for b in range(BLOCKS) if b not in SRC]] = float("nan")
    expected = plain(ops, caches)
    ops.copy_blocks(stack, ids(*SRC[:count]), ids(*DST[:count]))
    expected[:, :, DST[:count]] = expected[:, :, SRC[:count]]
    assert equal(plain(ops, caches), expected)


@pytest.mark.usefixtures("some_threads")
@pytest.mark.parametrize("count", [0, 1, 4])
def test_blocks_come_back_from_host_memory_wherever_they_are_put(ops, count):
    stack, caches = make_cache_stack(ops, 3)
    before = plain(ops, caches)
    host = ops.alloc_host_blocks(stack, 9)
    assert host.is_cpu
    assert host.shape == (9, 3, 2, *caches[0][0].shape[1:])
    host.fill_(float("nan"))
    there = ids(8, 0, 5, 2)[:count]
    ops.swap_out(stack, host, ids(*SRC[:count]), there)
    assert torch.equal(plain(ops, caches), before)
    assert host[[b for b in range(9) if b not in there.tolist()]].isnan().all()

    for cache in (cache for pair in caches for cache in pair):
        cache.fill_(float("nan"))
    kept = host.clone()
    ops.swap_in(stack, host, there, ids(*DST[:count]))
    assert equal(host, kept)
    expected = torch.full_like(before, float("nan"))
    expected[:, :, DST[:count]] = before[:, :, SRC[:count]]
    assert equal(plain(ops, caches), expected)


def test_many_random_swaps_keep_every_block(ops):
    """A permutation of all blocks, done by way of host memory, and then the caches as a reader sees them."""
    stack, caches = make_cache_stack(ops, 2)
    before, host = plain(ops, caches), ops.alloc_host_blocks(stack, BLOCKS + 3)
    there, back = (torch.randperm(n, device="cpu")[:BLOCKS] for n in (BLOCKS + 3, BLOCKS))
    ops.swap_out(stack, host, torch.arange(BLOCKS, device="cpu"), there)
    ops.swap_in(stack, host, there, back)
    assert torch.equal(plain(ops, caches)[:, :, back], before)


def test_host_memory_costs_nothing_until_it_is_written(ops, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    if ops.name == "triton" and ON_CUDA:
        pytest.skip("what a GPU reads and writes is pinned, and resident from the start")
    stack, _ = make_cache_stack(ops, 1)
    probe = ops.alloc_host_blocks(stack, 1)

    def resident_mib() -> int:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmRSS"))

    before = resident_mib()
    host = ops.alloc_host_blocks(stack, (2 << 30) // probe.nbytes)
    assert resident_mib() - before < 64
    ops.swap_out(stack, host, ids(0, 1), ids(0, len(host) - 1))
    assert resident_mib() - before < 64


def test_blocks_that_do_not_exist_or_collide_are_refused(ops):
    stack, caches = make_cache_stack(ops, 1)
    before, host = plain(ops, caches), ops.alloc_host_blocks(stack, 4)
    host.zero_()
    swaps = (lambda src, dst: ops.swap_out(stack, host, src, dst), lambda src, dst: ops.swap_in(stack, host, src, dst))
    for move in (lambda src, dst: ops.copy_blocks(stack, src, dst), *swaps):
        with pytest.raises(ValueError, match="dst names a block twice"):
            move(ids(0, 1), ids(3, 3))
        with pytest.raises(IndexError, match="src names a block outside"):
            move(ids(1, BLOCKS), ids(2, 3))
        with pytest.raises(IndexError, match="dst names a block outside"):
            move(ids(1, 2), ids(-1, 3))
        with pytest.raises(TypeError, match="src"):
            move(ids(1).int(), ids(2))
        with pytest.raises(ValueError, match="dst has shape"):
            move(ids(1), ids(2, 3))
    for src, dst in ((ids(1, 2), ids(2, 3)), (ids(5), ids(5))):
        with pytest.raises(ValueError, match="dst names a block that src names too"):
            ops.copy_blocks(stack, src, dst)
    with pytest.raises(IndexError, match=r"dst names a block outside 0\.\.3"):
        swaps[0](ids(0), ids(4))
    with pytest.raises(IndexError, match=r"src names a block outside 0\.\.3"):
        swaps[1](ids(4), ids(0))
    with pytest.raises(ValueError, match="host has shape"):
        ops.swap_out(stack, host[:, :, :1].contiguous(), ids(0), ids(0))
    with pytest.raises(TypeError, match="host"):
        ops.swap_in(stack, host.double(), ids(0), ids(0))
    assert torch.equal(plain(ops, caches), before)
    assert not host.any()
    for move in swaps:  # the two ids count two different things
        move(ids(1), ids(1))


def test_caches_that_differ_or_are_none_make_no_stack(ops):
    _, caches = make_cache_stack(ops, 2)
    with pytest.raises(ValueError, match="a stack has at least one layer"):
        ops.stack_caches([])
    narrow = ops.alloc_kv_cache(BLOCKS - 1, *caches[0][0].shape[1:])
    with pytest.raises(ValueError, match="the caches of layer 2 do not have the shape of those of layer 0"):
        ops.stack_caches([*caches, narrow])
    with pytest.raises(TypeError, match="cache"):
        ops.stack_caches([(caches[0][0].double(), caches[0][1].double())])

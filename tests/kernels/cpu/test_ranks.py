"""Collective operations through shared memory, for tensors of any length."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from quire.kernels import KernelsUnavailable
from quire.kernels.cpu import library
from quire.kernels.cpu.ranks import CpuRanks, GivenUp, shared_file


@pytest.fixture(autouse=True)
def compiled() -> None:
    try:
        library.load()
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def make(size: int) -> list[CpuRanks]:
    file = shared_file(size)
    ranks = [CpuRanks(rank, size, file) for rank in range(size)]
    os.close(file)
    return ranks


def together(ranks: list[CpuRanks], call: Callable[[CpuRanks], Any]) -> list[Any]:
    """Call `call` on all ranks at the same time, in threads, and return the results."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [one.result(30) for one in [pool.submit(call, rank) for rank in ranks]]


# In elements: none, one, an odd number, exactly a place of 1 MiB, and several of them with a rest.
LENGTHS = (0, 1, 77, 2**18, 2**19, 3 * 2**19 + 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_sums_are_taken_in_the_order_of_the_ranks(size: int, dtype: torch.dtype) -> None:
    ranks = make(size)
    for length in LENGTHS:
        parts = [torch.randn(length).to(dtype) for _ in range(size)]
        for part in parts:  # some that only one order rounds away
            part[::2] = part[::2].sign() * 2.0 ** (20 * torch.randint(-1, 2, part[::2].shape))
        expected = torch.zeros(length)
        for part in parts:
            expected += part
        expected = expected.to(dtype)  # added up in float32, rounded once
        sums = together(ranks, lambda rank, parts=parts: rank.all_reduce(parts[rank.rank].clone()))
        assert all(torch.equal(found, expected) for found in sums)


def test_a_row_has_the_same_sum_alone_and_among_others() -> None:
    ranks = make(4)
    parts = [torch.randn(64, 1000) * 10.0 ** torch.randint(-4, 4, (64, 1000)) for _ in ranks]
    (together_, *_) = together(ranks, lambda rank: rank.all_reduce(parts[rank.rank].clone()))
    for row in (0, 31, 63):
        (alone, *_) = together(ranks, lambda rank, row=row: rank.all_reduce(parts[rank.rank][row : row + 1].clone()))
        assert torch.equal(alone[0], together_[row])


def test_nan_stays_nan() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    ranks = make(2)
    sums = together(ranks, lambda rank: rank.all_reduce(values.clone() if rank.rank else torch.zeros_like(values)))
    assert torch.equal(sums[0].isnan(), values.isnan())
    assert torch.equal(sums[0].nan_to_num(7.0), values.nan_to_num(7.0))
    (cancelled, _) = together(ranks, lambda rank: rank.all_reduce(-values if rank.rank else values.clone()))
    assert torch.equal(cancelled.isnan(), ~values.isfinite())
    assert (cancelled[values.isfinite()] == 0).all()


def test_broadcast_and_gather() -> None:
    ranks = make(3)
    for length in (*LENGTHS, 7):
        values = [torch.randint(0, 2**31 - 1, (length,), dtype=torch.int32) for _ in ranks]
        got = together(ranks, lambda rank, values=values: rank.broadcast(values[rank.rank].clone()))
        assert all(torch.equal(one, values[0]) for one in got)
        first, *others = together(ranks, lambda rank, values=values: rank.gather(values[rank.rank]))
        assert torch.equal(first, torch.stack(values))
        assert others == [None, None]


@pytest.mark.slow
def test_many_calls_in_a_row_never_mix_their_values() -> None:
    """Without a pause between them, so that a fast rank is in the next call while a slow one still reads."""
    ranks = make(3)
    count = 3000

    def run(rank: CpuRanks) -> list[float]:
        values = torch.empty(11)
        return [float(rank.all_reduce(values.fill_(number * (rank.rank + 1)))[number % 11]) for number in range(count)]

    assert together(ranks, run) == [[6.0 * number for number in range(count)]] * 3


def test_no_rank_waits_for_one_that_has_ended() -> None:
    ranks = make(2)
    ones = torch.ones(3)

    def wait() -> None:
        with pytest.raises(GivenUp):
            ranks[0].all_reduce(ones)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        end = time.monotonic() + 10
        while ranks[1]._memory.find(ones.numpy().tobytes()) < 0:  # it writes, and then it waits
            assert time.monotonic() < end
        ranks[1].give_up()
        waiting.result(10)
    with pytest.raises(GivenUp):
        ranks[0].broadcast(torch.ones(3))
    with pytest.raises(GivenUp):
        ranks[1].gather(torch.ones(3))


def test_a_wrong_tensor_is_refused_before_any_rank_waits() -> None:
    (rank,) = make(1)
    for dtype in (torch.float16, torch.float64, torch.int32):
        with pytest.raises(TypeError, match=str(dtype)):
            rank.all_reduce(torch.ones(3, dtype=dtype))
    for call in (rank.all_reduce, rank.broadcast, rank.gather):
        with pytest.raises(ValueError, match="not contiguous"):
            call(torch.ones(3, 4).t())
    assert CpuRanks.bytes_for(64) > 0
    with pytest.raises(ValueError, match="65 ranks"):
        CpuRanks.bytes_for(65)

"""Functions that kernels call: the binary search of work lists, and the online softmax.

A merge of two ranges of keys gives what one range gives, and float16 holds what it has to.
"""

import math

import pytest
import torch

from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from quire.kernels.gpu.online_softmax import computes_in_float16, fold, merge, to_float16
from quire.kernels.gpu.search import owner

SIZE = 16


@triton.jit if ON_CUDA else InterpretedFunction
def halves_kernel(q, k, v, seen, out, scale, SIZE: tl.constexpr):
    """out = softmax(q k^T * scale, in base 2) v over 2 * SIZE keys: each half folded alone, then merged."""
    i = tl.arange(0, SIZE)
    square = i[:, None] * SIZE + i[None, :]
    queries = tl.load(q + square)
    low_most, low_total = tl.full([SIZE], float("-inf"), tl.float32), tl.zeros([SIZE], tl.float32)
    most, total, mixed = low_most, low_total, tl.zeros([SIZE, SIZE], tl.float32)
    for half in range(2):
        keys = tl.load(k + half * SIZE * SIZE + i[None, :] * SIZE + i[:, None])
        values = tl.load(v + half * SIZE * SIZE + square)
        mask = tl.load(seen + i[:, None] * 2 * SIZE + half * SIZE + i[None, :]) != 0
        empty = tl.zeros([SIZE, SIZE], tl.float32)
        a, b, c = fold(queries, keys, values, mask, low_most, low_total, empty, scale, 0.0, True, False, "ieee")
        most, total, mixed = merge(most, total, mixed, a, b, c)
    tl.store(out + square, mixed / tl.where(total > 0, total, 1.0)[:, None])


def test_two_ranges_of_keys_are_merged(ops):
    q, k, v = torch.randn(SIZE, SIZE), torch.randn(2 * SIZE, SIZE), torch.randn(2 * SIZE, SIZE)
    seen = torch.rand(SIZE, 2 * SIZE) < 0.5
    seen[3] = False  # no key at all
    seen[4, :SIZE], seen[5, SIZE:] = False, False
    seen[4, SIZE], seen[5, 0] = True, True
    out = torch.empty(SIZE, SIZE)
    halves_kernel[(1,)](q, k, v, seen.int(), out, 0.3, SIZE=SIZE)
    scores = (q @ k.T).double() * 0.3 * math.log(2)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(out.double(), weights @ v.double(), rtol=1e-5, atol=1e-5)


@triton.jit if ON_CUDA else InterpretedFunction
def to_float16_kernel(q, out, factors, ROWS: tl.constexpr, D: tl.constexpr):
    """out, factors = to_float16(q)"""
    row = tl.arange(0, ROWS)
    square = row[:, None] * D + tl.arange(0, D)[None, :]
    halves, inverse = to_float16(tl.load(q + square))
    tl.store(out + square, halves)
    tl.store(factors + row, inverse)


def in_float16(q: torch.Tensor) -> torch.Tensor:
    """The values that `to_float16` keeps, without the factors of the rows, in float64."""
    out, factors = torch.empty_like(q, dtype=torch.float16), torch.empty(len(q))
    to_float16_kernel[(1,)](q, out, factors, ROWS=len(q), D=q.shape[1])
    largest = out.abs().max(dim=1).values
    assert ((largest >= 2**14) & (largest < 2**15) | (q.abs().max(dim=1).values < 2**-112)).all()
    return out.double() * factors.double()[:, None]


def test_queries_in_float16_are_exact_if_they_are_not_tiny_beside_the_largest_of_their_row(ops):
    """Every normal number of bfloat16, with 2**-110 to 2**127 as the largest value of its row."""
    values = torch.arange(0x80, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.cat([values, values[: -len(values) % 128]]).view(-1, 128)
    for exponent in (-110, -40, -3, 0, 30, 90, 127):
        q = values.clone()
        q[q.abs() > 2.0**exponent] = 0
        q[:, 0] = 2.0**exponent
        q = torch.cat([q, -q])[: 1 << (2 * len(q)).bit_length() - 1]
        kept, given = in_float16(q), q.double()
        large = given.abs() >= 2.0 ** (exponent - 31)
        assert torch.equal(kept[large], given[large])
        assert (kept - given).abs().max() <= 2.0 ** (exponent - 39)


def test_a_row_in_float16_depends_on_that_row_alone(ops):
    q = (torch.randn(64, 32) * 2.0 ** torch.linspace(-90, 90, 64)[:, None]).bfloat16()
    kept = in_float16(q)
    for row in (0, 13, 63):
        alone = q[row].expand(16, -1).contiguous()
        assert torch.equal(in_float16(alone)[0], kept[row])


def test_rows_of_zeros_and_of_the_smallest_numbers_stay_finite(ops):
    q = torch.zeros(16, 32, dtype=torch.bfloat16)
    q[1], q[2] = 1e-40, 2.0**-126
    kept = in_float16(q)
    assert kept.isfinite().all()
    assert not kept[0].any()
    assert ((kept - q.double()).abs() < 2.0**-126).all()  # a device may take such numbers as zeros


def test_only_products_of_bfloat16_with_fp8_are_computed_in_float16():
    fp8 = torch.float8_e4m3fn
    assert computes_in_float16(torch.bfloat16, fp8, 128)
    assert not computes_in_float16(torch.bfloat16, fp8, 256)
    for pair in ((torch.bfloat16, torch.bfloat16), (torch.float16, fp8), (torch.float32, fp8)):
        assert not computes_in_float16(*pair, 128)


LANES = 64


@triton.jit if ON_CUDA else InterpretedFunction
def owner_kernel(starts, out, count, steps, STRIDE: tl.constexpr, LANES: tl.constexpr):
    at = tl.arange(0, LANES)
    tl.store(out + at, owner(starts, at, count, steps, STRIDE))


@pytest.mark.parametrize("starts", [[0], [0, 10], [0, 0, 3, 3, 7, 63], list(range(40))], ids=len)
@pytest.mark.parametrize("stride", [1, 3])
def test_an_index_belongs_to_the_last_start_at_or_before_it(ops, starts, stride):
    spread = torch.zeros(len(starts) * stride, dtype=torch.int32)
    spread[::stride] = torch.tensor(starts, dtype=torch.int32)
    out = torch.full((LANES,), -1, dtype=torch.int32)
    owner_kernel[(1,)](spread, out, len(starts), len(starts).bit_length(), STRIDE=stride, LANES=LANES)
    assert out.tolist() == [max(i for i, start in enumerate(starts) if start <= at) for at in range(LANES)]

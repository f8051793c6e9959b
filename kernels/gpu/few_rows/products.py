"""Products of a few rows with the norm before them and the activation or the sum after them, in one kernel.

Each value is rounded where the single operations of kernels/ops.py round it; only the order of the sums over K differs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.few_rows.dependent_launch import let_next_start, wait_for_previous
from quire.kernels.gpu.tile_sizes import MIN_ROWS, power_of_2

PLAIN, SILU_MUL, GELU_MUL = 0, 1, 2  # what becomes of the sums: nothing, or the gated activation of two halves
GELU_SCALE: tl.constexpr = tl.constexpr(1.5957691216057308)  # of GELU's approximation by tanh; see kernels/gpu/rows.py


class ProductTiles(NamedTuple):
    """Tile sizes and launch options of a product of a few rows."""

    columns: int  # output features of a program
    depth: int  # input features of a step of its loop
    warps: int
    stages: int


@triton.jit
def _factors(x, row, rows, eps, K, DEPTH: tl.constexpr, ROWS: tl.constexpr):
    """Return 1 / rms of each row of x [rows, K], [ROWS] float32."""
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in tl.range(0, K, DEPTH):
        inside = (row < rows)[:, None] & (start + depth < K)[None, :]
        value = tl.load(x + row[:, None] * K + start + depth[None, :], mask=inside, other=0.0).to(tl.float32)
        total += value * value
    return 1.0 / tl.sqrt_rn(tl.sum(total, axis=1) / K + eps)


@triton.jit
def _activation(gate, up, act: tl.constexpr, GATE: tl.constexpr):
    """Return silu(gate) * up, or gelu(gate) * up if GATE is 2. Gate, up and the activation are rounded to act."""
    gate, up = gate.to(act).to(tl.float32), up.to(act).to(tl.float32)
    inside_exp = gate
    if GATE == 2:
        inside_exp = GELU_SCALE * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-inside_exp))).to(act).to(tl.float32) * up


@triton.jit
def one_row_kernel(
    x, norm, weight, bias, residual, out, eps, N, K,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [K], weight [N, K] ([2 N, K] with GATE: gates, then ups), bias [N] -> out [N]. grid (cdiv(N, COLUMNS),).

    NORM: x is first divided by its rms and multiplied by norm [K]. ADD: residual [N] is added to the rounded product.
    The first weights are on their way before the kernel waits for x; in the loop, those of the next step.
    """
    act: tl.constexpr = x.dtype.element_ty
    if PDL:
        let_next_start()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    exists = (column < N)[:, None]
    at = weight + column.to(tl.int64)[:, None] * K + depth[None, :]
    first = exists & (depth < K)[None, :]
    w = tl.load(at, mask=first, other=0.0)
    if GATE:
        second_at = at + N.to(tl.int64) * K
        u = tl.load(second_at, mask=first, other=0.0)
    if PDL:
        wait_for_previous()

    if NORM:
        squares = tl.zeros([DEPTH], tl.float32)
        for start in tl.range(0, K, DEPTH):
            value = tl.load(x + start + depth, mask=start + depth < K, other=0.0).to(tl.float32)
            squares += value * value
        factor = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / K + eps)
    total = tl.zeros([COLUMNS, DEPTH], tl.float32)
    if GATE:
        second = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for start in tl.range(0, K, DEPTH):
        inside = start + depth < K
        value = tl.load(x + start + depth, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            of_norm = tl.load(norm + start + depth, mask=inside, other=0.0).to(tl.float32)
            value = ((value * factor).to(act).to(tl.float32) * of_norm).to(act).to(tl.float32)
        follows = exists & (start + DEPTH + depth < K)[None, :]
        next_w = tl.load(at + start + DEPTH, mask=follows, other=0.0)
        total += w.to(tl.float32) * value[None, :]
        w = next_w
        if GATE:
            next_u = tl.load(second_at + start + DEPTH, mask=follows, other=0.0)
            second += u.to(tl.float32) * value[None, :]
            u = next_u
    result = tl.sum(total, axis=1)
    if BIAS:
        result += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
    if GATE:
        up = tl.sum(second, axis=1)
        if BIAS:
            up += tl.load(bias + N + column, mask=column < N, other=0.0).to(tl.float32)
        result = _activation(result, up, act, GATE)
    if ADD:
        result = result.to(act).to(tl.float32) + tl.load(residual + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(act), mask=column < N)


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x, norm, weight, bias, residual, out, rows, eps, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute what `one_row_kernel` does for x [rows, K], residual and out [rows, N]. grid (cdiv(N, COLUMNS),).

    ROWS: the fewest rows of a matrix instruction, at least `rows`.
    """
    act: tl.constexpr = x.dtype.element_ty
    if PDL:
        let_next_start()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth, row = tl.arange(0, DEPTH), tl.arange(0, ROWS)
    exists, is_row = (column < N)[None, :], (row < rows)[:, None]
    x_at = x + row[:, None] * K + depth[None, :]
    at = weight + column.to(tl.int64)[None, :] * K + depth[:, None]
    second_at = at + N.to(tl.int64) * K
    if PDL:
        wait_for_previous()

    factor = tl.zeros([ROWS], tl.float32)
    if NORM:
        factor = _factors(x, row, rows, eps, K, DEPTH, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, DEPTH):
        inside = start + depth < K
        value = tl.load(x_at + start, mask=is_row & inside[None, :], other=0.0)
        if NORM:
            of_norm = tl.load(norm + start + depth, mask=inside, other=0.0).to(tl.float32)[None, :]
            value = ((value.to(tl.float32) * factor[:, None]).to(act).to(tl.float32) * of_norm).to(act)
        w = tl.load(at + start, mask=exists & inside[:, None], other=0.0)
        total = tl.dot(value, w, total, input_precision=PRECISION)
        if GATE:
            u = tl.load(second_at + start, mask=exists & inside[:, None], other=0.0)
            second = tl.dot(value, u, second, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if GATE:
        if BIAS:
            second += tl.load(bias + N + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        total = _activation(total, second, act, GATE)
    place = row[:, None] * N + column[None, :]
    if ADD:
        added = tl.load(residual + place, mask=is_row & exists, other=0.0).to(tl.float32)
        total = total.to(act).to(tl.float32) + added
    tl.store(out + place, total.to(act), mask=is_row & exists)


def tiles_of(rows: int, n: int, k: int, gated: bool, multiprocessors: int, dtype: torch.dtype) -> ProductTiles:
    """Return the tiles of a product. n, k: output and input features.

    One row: two programs for each multiprocessor if n is large enough, each with 16 KB of weights on their way.
    """
    halves = 2 if gated else 1
    if rows == 1:
        columns = min(8 // halves, max(1, power_of_2(n // (2 * multiprocessors) + 1) // 2))
        depth = min(power_of_2(k), 2048 // dtype.itemsize * (8 // (columns * halves)))
        return ProductTiles(columns, max(32, min(depth, 2048)), 4, 1)
    columns = 16 if n <= 32 * multiprocessors else 32
    return ProductTiles(columns, 128 if dtype.itemsize == 2 else 32, 4, 4 if gated else 5)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiprocessors: int,
    pdl: bool,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: int = PLAIN,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the product of x [T, K] with weight [N, K], T from 1 to MIN_ROWS, as [T, N] of x's dtype.

    norm [K], eps: of an RMS norm of x before the product. gate: SILU_MUL or GELU_MUL; weight and bias are then those of
    `pack_gate_up`, [2 N, K] and [2 N]. residual [T, N]: added to the rounded product; only without a gate,
    because the compiler would fuse the product of the activation with this sum, and not round it. Returns a new tensor.
    """
    assert residual is None or gate == PLAIN
    rows, k = x.shape
    n = len(weight) // (1 if gate == PLAIN else 2)
    out = x.new_empty((rows, n))
    tiles = tiles_of(rows, n, k, gate != PLAIN, multiprocessors, x.dtype)
    given = (x if norm is None else norm, weight, x if bias is None else bias, x if residual is None else residual)
    options = {
        "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "NORM": norm is not None, "GATE": gate,
        "BIAS": bias is not None, "ADD": residual is not None, "PDL": pdl,
        "num_warps": tiles.warps, "num_stages": tiles.stages, "launch_pdl": pdl,
    }  # fmt: skip
    grid = (triton.cdiv(n, tiles.columns),)
    if rows == 1:
        one_row_kernel[grid](x, *given, out, eps, n, k, **options)
    else:
        precision = "tf32x3" if x.dtype == torch.float32 else "tf32"
        few_rows_kernel[grid](x, *given, out, rows, eps, n, k, ROWS=MIN_ROWS, PRECISION=precision, **options)
    return out

"""A matrix multiplication whose rows do not depend on each other, for the batch-invariant mode.

cuBLAS chooses its algorithm, and with it the order of additions, by the number of rows. Here each element is the sum
over K in one order, by instructions that add 16 products at once (8 of float32), whatever else is computed: a decode
step gives the same bits as a prompt. Therefore K is never split. The number of rows and columns of a tile changes no
sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.tile_sizes import dot_precision, matmul_tiles


@triton.jit(do_not_specialize=["tokens"])
def matmul_kernel(
    x, weight, bias, out, tokens, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, EVEN_K: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x [tokens, K], weight [N, K], bias [N] -> out [tokens, N]. grid (cdiv(tokens, ROWS) * cdiv(N, COLUMNS),).

    Successive programs share a tile of weights. Programs are ordered in bands of BAND tiles of rows over all columns,
    so that the programs that run at the same time read little more than a square of tiles. Offsets are int64.
    """
    row_tiles = tl.cdiv(tokens, ROWS)
    of_band = tl.cdiv(N, COLUMNS) * BAND
    first = tl.program_id(0) // of_band * BAND
    height = tl.minimum(row_tiles - first, BAND)
    row = (first + tl.program_id(0) % of_band % height) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % of_band // height) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[:, None] * K + depth[None, :]
    w_at = weight + column.to(tl.int64)[None, :] * K + depth[:, None]
    rows, columns = (row < tokens)[:, None], (column < N)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, DEPTH):
        if EVEN_K:
            a = tl.load(x_at + start, mask=rows, other=0.0)
            b = tl.load(w_at + start, mask=columns, other=0.0)
        else:
            inside = start + depth < K
            a = tl.load(x_at + start, mask=rows & inside[None, :], other=0.0)
            b = tl.load(w_at + start, mask=columns & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=rows & columns)


def invariant_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Return x [T, K] times weight [N, K] transposed, plus bias [N], as [T, N] of out_dtype; sums are in float32."""
    tokens, k = x.shape
    n = weight.shape[0]
    if out is None:
        out = torch.empty((tokens, n), dtype=out_dtype, device=x.device)
    if tokens == 0:
        return out
    tiles = matmul_tiles(tokens, n, x.dtype)
    matmul_kernel[(triton.cdiv(tokens, tiles.rows) * triton.cdiv(n, tiles.columns),)](
        x, weight, x if bias is None else bias, out, tokens, n, k,
        ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, BAND=16, EVEN_K=k % tiles.depth == 0,
        BIAS=bias is not None, PRECISION=dot_precision(x.dtype), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out

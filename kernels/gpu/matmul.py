"""A product whose rows do not depend on each other, for the batch-invariant mode: one tile size for any number of rows.

cuBLAS chooses its algorithm by the number of rows, and with it the order of additions. Here each element is the sum
over K in one order, tile after tile, whatever else is computed: a decode step gives the bits that a prompt gave.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tiles import dot_precision


@triton.jit(do_not_specialize=["tokens"])
def matmul_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x [tokens, K], weight [N, K], bias [N] -> out [tokens, N]. grid (cdiv(tokens, ROWS) * cdiv(N, COLUMNS),).

    Programs that share a tile of weights follow each other. int64 offsets.
    """
    row_tiles = tl.cdiv(tokens, ROWS)
    row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
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


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] of out_dtype, added up in float32."""
    tokens, k = x.shape
    n = weight.shape[0]
    if out is None:
        out = torch.empty((tokens, n), dtype=out_dtype, device=x.device)
    if tokens == 0:
        return out
    wide = x.dtype == torch.float32
    rows, columns, depth = (32, 32, 32) if wide else (64, 64, 64)
    matmul_kernel[(triton.cdiv(tokens, rows) * triton.cdiv(n, columns),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        tokens,
        n,
        k,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        EVEN_K=k % depth == 0,
        BIAS=bias is not None,
        PRECISION=dot_precision(x.dtype),
        num_warps=4,
        num_stages=3 if wide else 4,
    )
    return out

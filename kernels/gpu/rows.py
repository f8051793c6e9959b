"""Kernels that go over rows: norms, the gated activation, the embedding.

One program per row, or per part of one; a row is read once and written once, so the memory sets the pace. Sums are
taken in float32, results rounded where kernels/ops.py says.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, residual, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr):
    """out = x / rms(x), rounded, times weight. With ADD residual += x first, and the sum is what is normalised.

    x, residual, out [rows, WIDTH] contiguous; weight [WIDTH]; grid (rows,). Hugging Face LlamaRMSNorm.
    """
    at = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + at + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + at + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / WIDTH
    scaled = (value * (1.0 / tl.sqrt_rn(mean + eps))).to(x.dtype.element_ty)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    product = scaled.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + at + column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, inner, BLOCK: tl.constexpr):
    """gate_up [T, 2 * inner]: gates, then ups -> out [T, inner] = silu(gate) * up; silu(gate) is rounded.

    grid (T, cdiv(inner, BLOCK)).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=inside, other=0.0).to(tl.float32)
    # exp of a large positive number is infinity, and the quotient then zero, as it should be
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row * inner + column, (silu.to(tl.float32) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def embed_kernel(token_ids, table, out, vocabulary, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, WIDTH] = table [vocabulary, WIDTH] at token_ids [T]. An id outside the table reads nothing and gives NaN.

    grid (T, cdiv(WIDTH, BLOCK)).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    token = tl.load(token_ids + row).to(tl.int64)
    exists = (token >= 0) & (token < vocabulary)
    value = tl.load(table + token * WIDTH + column, mask=inside & exists, other=float("nan"))
    tl.store(out + row * WIDTH + column, value, mask=inside)

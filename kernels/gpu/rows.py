"""Kernels that compute each row (token) independently: norms, the gated activation, the embedding.

A program computes a row or a part of one. Each value is read and written once, so the memory bandwidth is the limit.
Sums are taken in float32; results are rounded as kernels/ops.py defines. The functions take checked arguments.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.tile_sizes import power_of_2

BLOCK = 1024  # columns of one program


@triton.jit
def rms_norm_kernel(x, residual, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr):
    """Compute out = x / rms(x), rounded, times weight (Hugging Face LlamaRMSNorm).

    ADD: first residual += x, and then the residual takes the place of x. x, residual, out [rows, WIDTH] contiguous;
    weight [WIDTH]. grid (rows,).
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
def silu_mul_kernel(gate_up, out, inner, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Compute out [T, inner] = silu(gate) * up from gate_up [T, 2 * inner]: gates, then ups. silu(gate) is rounded.

    GELU: with the approximation of GELU by tanh instead, gate * sigmoid(1.596 * (gate + 0.0447 * gate^3)).
    grid (T, cdiv(inner, BLOCK)).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=inside, other=0.0).to(tl.float32)
    # If exp overflows to infinity, the quotient is zero, as it should be.
    inside_exp = gate
    if GELU:
        inside_exp = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    silu = (gate / (1.0 + tl.exp(-inside_exp))).to(out.dtype.element_ty)
    tl.store(out + row * inner + column, (silu.to(tl.float32) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def embed_kernel(token_ids, table, out, vocabulary, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out [T, WIDTH] = table [vocabulary, WIDTH] at token_ids [T]. An id outside the table gives NaN.

    grid (T, cdiv(WIDTH, BLOCK)).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    token = tl.load(token_ids + row).to(tl.int64)
    exists = (token >= 0) & (token < vocabulary)
    value = tl.load(table + token * WIDTH + column, mask=inside & exists, other=float("nan"))
    tl.store(out + row * WIDTH + column, value, mask=inside)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [..., H], or of the residual after x was added to it in place."""
    out, width = torch.empty_like(x), x.shape[-1]
    if x.numel():
        padded = power_of_2(width)
        # At most one thread per value: otherwise several threads would read one value of the residual, and one of them
        # might read the sum.
        warps = max(1, min(4, padded // 32)) if padded <= 2048 else 8 if padded <= 8192 else 16
        rms_norm_kernel[(x.numel() // width,)](
            x, x if residual is None else residual, weight, out, eps,
            WIDTH=width, PADDED=padded, ADD=residual is not None, num_warps=warps,
        )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """Fill and return out [T, I] = silu(gate) * up from gate_up [T, 2I]."""
    return _gated(gate_up, out, gelu=False)


def gelu_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """Fill and return out [T, I] = gelu(gate) * up from gate_up [T, 2I]."""
    return _gated(gate_up, out, gelu=True)


def _gated(gate_up: Tensor, out: Tensor, gelu: bool) -> Tensor:
    rows, inner = out.shape
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(inner, BLOCK))](gate_up, out, inner, BLOCK=BLOCK, GELU=gelu)
    return out


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows of table [V, H] at token_ids [T]."""
    vocabulary, width = table.shape
    out = table.new_empty((len(token_ids), width))
    if len(token_ids):
        grid = len(token_ids), triton.cdiv(width, BLOCK)
        embed_kernel[grid](token_ids, table, out, vocabulary, WIDTH=width, BLOCK=BLOCK)
    return out

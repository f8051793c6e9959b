"""FP8 products on tensor cores: activations are rounded to e4m3 per row, and cuBLAS or CUTLASS multiplies the codes.

The definition is `fp8_rows.fp8_linear`. Needs compute capability 8.9. The scale of a row depends on that row alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fp8_rows import FP8_DYNAMIC
from quire.kernels.gpu.supported import FP8
from quire.kernels.gpu.tile_sizes import power_of_2
from quire.kernels.grouped_weight import GroupedWeight


@dataclass(frozen=True, eq=False)
class TritonFp8Linear:
    """The weights of one linear layer. gate_up: I rows of the gate, then I rows of the up projection."""

    kind: ClassVar[str] = FP8_DYNAMIC

    weight: Tensor  # [N, K] float8_e4m3fn
    scales: Tensor  # [1, N] float32
    unit: Tensor  # [] float32: the scale of a product whose scales are applied to its result
    bias: Tensor | None
    dtype: torch.dtype  # of activations
    gate_up: bool = False

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.weight, self.scales, self.bias) if part is not None)


def pack_fp8(
    weight: GroupedWeight, scales: Tensor, bias: Tensor | None, gate_up: bool, dtype: torch.dtype, device: torch.device
) -> TritonFp8Linear:
    """Copy weights to the device. scales: `channel_scales` of the weight. dtype: of activations."""
    codes = weight.codes.view(FP8).to(device)
    unit = torch.ones((), device=device)
    return TritonFp8Linear(codes, scales[None].to(device), unit, bias, dtype, gate_up)


@triton.jit
def quantize_rows_kernel(x, codes, scales, SMALLEST: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Compute `fp8_rows.quantize_rows`: x [T, WIDTH] -> codes [T, WIDTH] float8e4nv, scales [T] float32. grid (T,).

    No quotient exceeds 448 by more than its rounding, so none saturates. NaN stays NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), axis=0), 448.0), SMALLEST)
    tl.store(scales + row, scale)
    tl.store(codes + row * WIDTH + column, tl.div_rn(value, scale).to(codes.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [T, K] float8_e4m3fn of x [T, K] and the scales [T, 1] float32. T is at least 1."""
    rows, width = x.shape
    codes = torch.empty_like(x, dtype=FP8)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    padded = power_of_2(width)
    warps = max(1, min(4, padded // 32)) if padded <= 2048 else 8 if padded <= 8192 else 16
    quantize_rows_kernel[(rows,)](
        x, codes, scales, SMALLEST=torch.finfo(torch.float32).tiny, WIDTH=width, PADDED=padded, num_warps=warps
    )
    return codes, scales


def fp8_matmul(x: Tensor, packed: TritonFp8Linear, out: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Return x [T, K], rounded, times the weights, plus the bias, as [T, N] of out_dtype; sums are in float32.

    A bfloat16 result is scaled within the product. The kernels of torch with scales per row give no other type on all
    devices, so that other results are scaled afterwards, in float32.
    """
    if not len(x):
        return torch.empty((0, packed.out_features), dtype=out_dtype, device=x.device) if out is None else out
    codes, scales = quantize_rows(x)
    columns = packed.weight.T
    if out_dtype is torch.bfloat16:
        product = torch._scaled_mm(codes, columns, scales, packed.scales, bias=packed.bias, out_dtype=out_dtype)
    else:
        product = torch._scaled_mm(codes, columns, scale_a=packed.unit, scale_b=packed.unit, out_dtype=torch.float32)
        product.mul_(scales).mul_(packed.scales)
        if packed.bias is not None:
            product += packed.bias
        product = product.to(out_dtype)
    return product if out is None else out.copy_(product)

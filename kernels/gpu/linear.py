"""Linear layers: cuBLAS through torch, `fp8_matmul`, `grouped_matmul`, or `invariant_matmul` to be batch-invariant."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu.fp8_matmul import TritonFp8Linear, fp8_matmul
from quire.kernels.gpu.grouped_matmul import TritonGroupedLinear, grouped_matmul
from quire.kernels.gpu.invariant_matmul import invariant_matmul
from quire.kernels.reference_linear import ReferenceLinear


@dataclass(frozen=True, eq=False)
class TritonLinear(ReferenceLinear):
    """Weights as torch.nn.Linear keeps them. gate_up: I rows of the gate, then I rows of the up projection."""

    gate_up: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype


AnyTritonLinear = TritonLinear | TritonGroupedLinear | TritonFp8Linear
GroupedMatmul = Callable[..., Tensor]  # as `grouped_matmul`
Fp8Matmul = Callable[..., Tensor]  # as `fp8_matmul`


def linear(
    x: Tensor,
    packed: AnyTritonLinear,
    out: Tensor | None,
    invariant: bool = False,
    grouped: GroupedMatmul = grouped_matmul,
    fp8: Fp8Matmul = fp8_matmul,
) -> Tensor:
    """Return x [T, K] times the weights as [T, N] of x's dtype. cuBLAS adds the bias before it rounds.

    grouped: the kernel for weights that are codes. fp8: that for FP8 weights with activations that are rounded.
    """
    if isinstance(packed, TritonFp8Linear):
        return fp8(x, packed, out, x.dtype)
    if isinstance(packed, TritonGroupedLinear):
        return grouped(x, packed, out, x.dtype, invariant)
    if invariant:
        return invariant_matmul(x, packed.weight, packed.bias, out, x.dtype)
    if out is None:
        return F.linear(x, packed.weight, packed.bias)
    if packed.bias is None:
        return torch.mm(x, packed.weight.T, out=out)
    return torch.addmm(packed.bias, x, packed.weight.T, out=out)


def linear_float32(
    x: Tensor,
    packed: AnyTritonLinear,
    invariant: bool = False,
    grouped: GroupedMatmul = grouped_matmul,
    fp8: Fp8Matmul = fp8_matmul,
) -> Tensor:
    """Return x [R, K] times the weights as [R, N] float32, without rounding to x's dtype in between."""
    if isinstance(packed, TritonFp8Linear):
        return fp8(x, packed, None, torch.float32)
    if isinstance(packed, TritonGroupedLinear):
        return grouped(x, packed, None, torch.float32, invariant)
    if invariant:
        return invariant_matmul(x, packed.weight, packed.bias, None, torch.float32)
    if x.dtype == torch.float32:
        return F.linear(x, packed.weight, packed.bias)
    if x.is_cuda:
        product = torch.mm(x, packed.weight.T, out_dtype=torch.float32)
    else:  # torch has out_dtype on CUDA only. In pieces: a float32 copy of the whole head would be large
        pieces = torch.split(packed.weight, 8192)
        product = torch.cat([F.linear(x.float(), rows.float()) for rows in pieces], dim=-1)
    return product if packed.bias is None else product.add_(packed.bias)

"""Linear layers: cuBLAS through torch, which has no rival for dense products, and what surrounds it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu.matmul import matmul


@dataclass(frozen=True, eq=False)
class TritonLinear:
    weight: Tensor  # [N, K]
    bias: Tensor | None
    gate_up: bool = False

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


def multiply(x: Tensor, packed: TritonLinear, out: Tensor | None, invariant: bool = False) -> Tensor:
    """x [T, K] -> [T, N] of x's type. The bias is added before the rounding, in cuBLAS' epilogue."""
    if invariant:
        return matmul(x, packed.weight, packed.bias, out, x.dtype)
    if out is None:
        return F.linear(x, packed.weight, packed.bias)
    if packed.bias is None:
        return torch.mm(x, packed.weight.T, out=out)
    return torch.addmm(packed.bias, x, packed.weight.T, out=out)


def multiply_to_float(x: Tensor, packed: TritonLinear, invariant: bool = False) -> Tensor:
    """x [R, K] -> [R, N] float32, straight from the accumulators."""
    if invariant:
        return matmul(x, packed.weight, packed.bias, None, torch.float32)
    if x.dtype == torch.float32:
        return F.linear(x, packed.weight, packed.bias)
    if x.is_cuda:
        product = torch.mm(x, packed.weight.T, out_dtype=torch.float32)
    else:  # torch multiplies into a wider type on CUDA only; in pieces, as a wide copy of the head would be large
        product = torch.cat([F.linear(x.float(), rows.float()) for rows in packed.weight.split(8192)], dim=-1)
    return product if packed.bias is None else product.add_(packed.bias)

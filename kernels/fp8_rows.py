"""FP8 products: weights in e4m3 with a scale per output channel, and activations that are rounded to e4m3 per row.

The field's term is W8A8 with dynamic scales per token. `fp8_linear` is the definition. Weights with a scale per group
or block, and activations that are not rounded, are those of `grouped_weight`.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.grouped_weight import FP8, LARGEST_E4M3, GroupedWeight

FP8_DYNAMIC = "fp8-dynamic"  # the kind of such a layer, and the value of --quantization
MULTIPLE = 16  # cuBLAS needs this divisor of the numbers of input and output features
MIN_FEATURES = 64  # of a sum; shorter ones gain nothing


@runtime_checkable
class Fp8Activations(Protocol):
    """Operations that may round the activations of layers with FP8 weights."""

    fp8_activations: bool  # they do so if `channel_scales` of the weights exist


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, K] to e4m3 with a scale per row. Returns float8_e4m3fn [T, K] and float32 scales [T, 1].

    x is about codes * scales. The largest absolute value of a row becomes 448. A row with NaN or infinity has a NaN.
    """
    wide = x.float()
    scales = (wide.abs().amax(dim=1, keepdim=True) / LARGEST_E4M3).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scales).to(torch.float8_e4m3fn), scales


def channel_scales(weight: GroupedWeight) -> Tensor | None:
    """Return the scales [N] of FP8 weights that have one per output channel or tensor; None for all other weights.

    None also for shapes that `torch._scaled_mm` does not multiply on GPUs.
    """
    n, k = weight.shape
    if weight.kind != FP8 or weight.order is not None or n % MULTIPLE or k % MULTIPLE or k < MIN_FEATURES:
        return None
    scales = weight.scales[:, 0]
    return scales.contiguous() if bool((weight.scales == scales[:, None]).all()) else None


def fp8_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """Return rounded x [T, K] times FP8 weights with `channel_scales`, plus the bias, as [T, N] float32."""
    codes, scales = quantize_rows(x)
    product = F.linear(codes.float() * scales, weight.dequantized())
    return product if bias is None else product + bias.float()

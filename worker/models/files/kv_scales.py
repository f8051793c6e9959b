"""Scales of keys and values for a KV cache in FP8, as a checkpoint stores them, folded into its weights.

A scale maps the largest keys of a layer to the largest number of the cache, 448. The kernels know no scales: a layer
computes keys that are divided by theirs and queries that are multiplied by it, so that scores stay the same, and values
likewise with the product after attention. Scales are rounded up to powers of two. So weights stay exact, and the cache
has the same relative precision, because its numbers are floating-point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from quire.kernels.weights import GroupedWeight, KQuantWeight, LinearWeight, Nvfp4Weight, QuantizedWeight
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.loader import Weights

# Names of the scale of keys or of values, after `model.layers.N.self_attn.`: of compressed-tensors, of ModelOpt, and of
# AutoFP8.
SCALE_NAMES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale")


class KVFactors(NamedTuple):
    """Powers of two by which the keys and the values of a layer are multiplied before they are stored."""

    k: float = 1.0
    v: float = 1.0

    def of_projection(self, name: str, has_norms: bool) -> float:
        """Return the factor of the output of a projection of attention, and for `o_proj` of its input.

        has_norms: norms of queries and keys follow the projections, and have the factors instead.
        """
        if name == "o_proj":
            return 1 / self.v
        if name == "v_proj":
            return self.v
        return {"q_proj": 1 / self.k, "k_proj": self.k}.get(name, 1.0) if not has_norms else 1.0


PLAIN = KVFactors()


def scale_names(layer: int) -> list[str]:
    """Return all names that the scales of a layer may have."""
    prefix = f"model.layers.{layer}.self_attn."
    return [prefix + name.format(part) for part in "kv" for name in SCALE_NAMES]


def read_kv_factors(weights: Weights, num_layers: int) -> list[KVFactors]:
    """Return the factors of each layer; PLAIN for a layer without scales. Raises CheckpointError."""
    return [KVFactors(*(_factor(weights, layer, part) for part in "kv")) for layer in range(num_layers)]


def _factor(weights: Weights, layer: int, part: str) -> float:
    for name in (f"model.layers.{layer}.self_attn.{scale_name.format(part)}" for scale_name in SCALE_NAMES):
        if name in weights:
            scale = float(weights.read_plain(name).float().max())  # some checkpoints have a scale per head
            if not 0 < scale < math.inf:
                what = f"tensor {name} is {scale:g}, expected a number above 0"
                raise CheckpointError(weights.folder, what, "copy the checkpoint again, or take --kv-cache-dtype auto")
            return 2.0 ** -math.ceil(math.log2(scale))
    return 1.0


def scaled_rows(weight: LinearWeight, factors: torch.Tensor) -> LinearWeight:
    """Return weights [N, K] whose rows are multiplied by factors [N], float32 powers of two."""
    if isinstance(weight, QuantizedWeight):
        by_row = factors if weight.bits == 8 else factors[:, None]
        return QuantizedWeight(weight.values, (weight.scales.float() * by_row).to(weight.scales.dtype), weight.bits)
    if isinstance(weight, GroupedWeight):
        scales = weight.scales * factors.to(weight.scales.device)[:, None]
        return replace(weight, scales=scales)
    if isinstance(weight, KQuantWeight):
        by_row = factors.to(weight.scales)[:, None]
        return replace(weight, scales=weight.scales * by_row, minimums=weight.minimums * by_row)
    if isinstance(weight, Nvfp4Weight):
        return replace(weight, channels=weight.channels * factors.to(weight.channels))
    return weight * factors.to(weight)[:, None]


def projection_factors(factors: KVFactors, sizes: Sequence[tuple[str, int]], has_norms: bool) -> torch.Tensor | None:
    """Return a factor for each row of projections that are packed side by side; None if all are one.

    sizes: name and rows of each.
    """
    parts = [torch.full((rows,), factors.of_projection(name, has_norms)) for name, rows in sizes]
    row_factors = torch.cat(parts)
    return None if bool((row_factors == 1).all()) else row_factors

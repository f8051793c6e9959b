"""Attention over a latent KV cache (MLA: DeepSeek, Kimi, GLM-4.7-Flash, LongCat), for models of Transformers.

Such a layer makes the keys and values of all heads of one latent vector per token, and a part of the keys with
positions that all heads share. Transformers calls the method `expand_kv` of the layer for that. Here the method returns
both parts as they are. The cache keeps them in one row. Each query is multiplied by the weights that would have made
the keys, and the result of attention by those that would have made the values ("absorbed"): the scores and results are
the same sums in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quire.kernels import MAX_LATENT_VALUE, MAX_LATENT_WIDTH, LatentOps, latent_ops
from quire.kernels.ops import Ops
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.transformers.fused_linear import PackedPart
from quire.worker.models.transformers.fused_norm import is_near
from quire.worker.models.transformers.layer_weights import AS_THEY_ARE, LayerWeights
from quire.worker.models.transformers.parts import Parts
from quire.worker.models.transformers.shapes import AttentionShape, LatentRow

log = logging.getLogger(__name__)


class _BothWeights:
    """The packed weights of keys and values, as one size."""

    def __init__(self, *parts: Any) -> None:
        self.nbytes = sum(part.nbytes for part in parts)


class LatentHeads:
    """The weights of the keys and values of one layer, packed for each head, and the attention with them."""

    def __init__(self, ops: LatentOps, row: LatentRow, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys [H, N, R]: N elements of a key without positions; values [H, V, R]. R: of the latent vector."""
        self._ops, self.row, self._plain = ops, row, keys.shape[1]
        pad = (0, row.value_dim - row.rank)
        self._keys = ops.pack_groups(nn.functional.pad(keys, pad).transpose(1, 2).contiguous())
        self._values = ops.pack_groups(nn.functional.pad(values, pad))
        self.packed = _BothWeights(self._keys, self._values)

    def attend(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        positional: torch.Tensor,
        cache: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """q [1, H, T, N + P], latents [1, 1, T, R], positional [1, 1, T, P] -> [1, T, H, V]"""
        row, plain, ops = self.row, self._plain, self._ops
        _, heads, tokens, _ = q.shape
        places = slice(0, row.rank), slice(row.value_dim, row.value_dim + row.positional)
        rows = q.new_zeros(tokens, row.width)
        for place, part in zip(places, (latents, positional), strict=True):
            rows[:, place] = part[0, 0]
        ops.cache_latent(rows, batch.slot_mapping, cache)
        absorbed = q.new_zeros(tokens, heads, row.width)
        products = ops.linear_groups(q[0, :, :, :plain].contiguous(), self._keys)
        absorbed[:, :, : row.value_dim] = products.transpose(0, 1)
        absorbed[:, :, places[1]] = q[0, :, :, plain:].transpose(0, 1)
        tables = batch.block_tables, batch.seq_lens, batch.query_start_loc
        mixed = ops.latent_attention(absorbed, cache, *tables, scale, row.value_dim, window)
        return ops.linear_groups(mixed.transpose(0, 1).contiguous(), self._values).transpose(0, 1)[None]


@dataclass(frozen=True)
class LatentLayer:
    """An attention module whose keys and values are made of a latent vector; a fusion (`linear.pack`)."""

    module: Any
    ops: LatentOps
    row: LatentRow
    num_heads: int

    @property
    def layers(self) -> Collection[nn.Module]:
        return (self.module.kv_b_proj,)

    @property
    def nbytes(self) -> int:
        weight: torch.Tensor = self.module.kv_b_proj.weight
        return weight.nbytes

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of the keys [H, N, R] and of the values [H, V, R]."""
        weight = self.module.kv_b_proj.weight.data.view(self.num_heads, -1, self.row.rank)
        return weight[:, : self.module.qk_nope_head_dim], weight[:, self.module.qk_nope_head_dim :]

    def is_right(self) -> bool:
        """Return whether the module expands random rows as `LatentHeads` assumes."""
        weight, given = self.module.kv_b_proj.weight, torch.Generator().manual_seed(0)
        latents, positional = (
            torch.randn(1, 1, 3, width, generator=given).to(weight) for width in (self.row.rank, self.row.positional)
        )
        try:
            with torch.inference_mode():
                keys, values = self.module.expand_kv(latents, positional)
                of_keys, of_values = (torch.einsum("tr,hnr->htn", latents[0, 0], half)[None] for half in self.halves())
                expected = torch.cat([of_keys, positional.expand(1, self.num_heads, -1, -1)], dim=-1)
                return keys.shape == expected.shape and is_near(keys, expected) and is_near(values, of_values)
        except Exception:  # any line of a model's code can raise anything
            log.debug("expand_kv is not as expected", exc_info=True)
            return False

    def pack(self, ops: Ops, parts: Parts, weights: LayerWeights = AS_THEY_ARE) -> None:
        """Pack the weights, drop the original, and have the module give its latent rows to the attention.

        Only models of one process have latent caches, so `parts` has no part of this layer. Its weights are kept as
        numbers, whatever `weights` has: those of keys are multiplied with queries.
        """
        projection = self.module.kv_b_proj
        heads = LatentHeads(self.ops, self.row, *(half.contiguous() for half in self.halves()))
        self.module.kv_b_proj = PackedPart(projection.weight.data, heads.packed)
        projection.weight = None
        self.module.expand_kv = _as_they_are
        self.module.latent_heads = heads


def _as_they_are(latents: torch.Tensor, positional: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of a row [1, 1, T, R] and [1, 1, T, P], for `LatentHeads`, in place of `expand_kv`."""
    return latents, positional


def find_latent_layers(
    ops: Ops, modules: Sequence[Any], shapes: list[AttentionShape], left: set[nn.Module]
) -> tuple[list[LatentLayer], list[AttentionShape]]:
    """Return the attention modules with a latent cache, and the shapes with their rows in `latent`.

    modules, shapes: of each attention call. left: linear layers that must not be packed. Without operations of latent
    caches, as on GPUs, the keys and values stay expanded.
    """
    layers: list[LatentLayer] = []
    kernels = latent_ops(ops)
    if kernels is None:
        return layers, shapes
    changed = list(shapes)
    for call, (module, shape) in enumerate(zip(modules, shapes, strict=True)):
        layer = _recognise(module, shape, kernels, left)
        if layer is None or layer.module in [other.module for other in layers] or not layer.is_right():
            continue
        layers.append(layer)
        changed[call] = replace(shape, latent=layer.row)
    if layers:
        expanded = max(2 * shape.num_kv_heads * shape.cache_dim for shape in shapes)
        what = "%d layers have a latent KV cache: %d values per token instead of %d for keys and values"
        log.info(what, len(layers), max(layer.row.width for layer in layers), expanded)
    return layers, changed


def _recognise(module: Any, shape: AttentionShape, ops: LatentOps, left: set[nn.Module]) -> LatentLayer | None:
    projection = getattr(module, "kv_b_proj", None)
    sizes = [getattr(module, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")]
    if not hasattr(module, "expand_kv") or type(projection) is not nn.Linear or projection in left:
        return None
    if projection.bias is not None or any(type(size) is not int or size < 1 for size in sizes):
        return None
    rank, positional, plain = (int(size) for size in sizes if size is not None)
    row, outputs = LatentRow(rank, positional), shape.num_heads * (plain + shape.value_dim)
    others = shape.softcap, shape.has_sinks, shape.chunk, shape.shared_with is not None
    fits = row.width <= MAX_LATENT_WIDTH and row.value_dim <= MAX_LATENT_VALUE and shape.head_dim == plain + positional
    if any(others) or shape.num_kv_heads != shape.num_heads or not fits:
        return None
    if (projection.in_features, projection.out_features) != (rank, outputs):
        return None
    return LatentLayer(module, ops, row, shape.num_heads)

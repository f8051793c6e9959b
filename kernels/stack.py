"""A decoder's layers and their KV caches, checked once when they are put together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import checks
from quire.kernels.moe import GELU, SILU
from quire.kernels.ops import AllReduceGroup, DecoderLayer

# The norms of a layer; all but the first two may be None.
NORMS = ("input_norm", "mlp_norm", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm")


@dataclass(frozen=True)
class Caches:
    """The KV caches of all layers: one pair (k, v) per layer, of `Ops.alloc_kv_cache`."""

    kv_cache: Sequence[tuple[Tensor, Tensor]]

    @property
    def tensors(self) -> list[Tensor]:
        """All caches in the order of a host block: layer by layer, k before v."""
        return [cache for pair in self.kv_cache for cache in pair]

    @property
    def num_blocks(self) -> int:
        return self.kv_cache[0][0].shape[0]

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of one block over all caches: [layers, 2 (k, v), H_kv, block_size, D].

        The last dimension is that of `Ops.alloc_kv_cache`.
        """
        return len(self.kv_cache), 2, *self.kv_cache[0][0].shape[1:]

    def check_caches(self, kv_heads: int | None, dtype: torch.dtype) -> torch.Size:
        """Return [blocks, H_kv, block_size, D] of all caches.

        kv_heads: the number that they must have; None allows any.
        Raises ValueError or TypeError if there is no cache, or if one has another shape or dtype.
        """
        shapes = [checks.caches(k, v, kv_heads, dtype) for k, v in self.kv_cache]
        if not shapes:
            raise ValueError("a stack has at least one layer")
        for index, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ValueError(f"the caches of layer {index} do not have the shape of those of layer 0")
        return shapes[0]


@dataclass(frozen=True)
class Stack(Caches):
    """The layers of a decoder with their caches. Fields as the arguments of `Ops.stack_layers`."""

    layers: Sequence[DecoderLayer]
    final_norm: Tensor
    cos_sin: Tensor
    num_heads: int
    num_kv_heads: int
    eps: float
    scale: float
    ranks: AllReduceGroup | None = None
    softcap: float = 0.0

    @property
    def inner(self) -> int:
        """The inner features of the MLPs that are no mixtures of experts; 0 without such MLPs."""
        return next((layer.down.in_features for layer in self.layers if layer.down is not None), 0)

    @staticmethod
    def linear_names(layer: DecoderLayer) -> tuple[str, ...]:
        """Return the names of the linear layers of a layer, without those of its experts."""
        return ("qkv", "o", "gate_up", "down") if layer.moe is None else ("qkv", "o")

    def check(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> tuple[int, torch.Size]:
        """Return the hidden size, and [blocks, H_kv, block_size, D] of each cache.

        dtype: of weights and activations; kv_dtype: of the caches, `dtype` if None.
        Raises ValueError or TypeError if shapes or dtypes do not fit together.
        """
        if not self.layers or len(self.layers) != len(self.kv_cache):
            raise ValueError(f"{len(self.layers)} layers and {len(self.kv_cache)} caches do not make a stack")
        hidden, inner = self.layers[0].qkv.in_features, self.inner
        shape = self.check_caches(self.num_kv_heads, kv_dtype or dtype)
        d = shape[3]
        checks.tensor("final_norm", self.final_norm, dtype, (hidden,))
        checks.tensor("cos_sin", self.cos_sin, torch.float32, (self.cos_sin.shape[0], d))
        if not self.softcap >= 0:
            raise ValueError(f"softcap is {self.softcap}")
        if self.num_heads % self.num_kv_heads or not self.scale > 0:
            raise ValueError(f"{self.num_heads} heads, {self.num_kv_heads} kv heads, scale {self.scale} do not fit")
        features = {
            "qkv": (hidden, (self.num_heads + 2 * self.num_kv_heads) * d),
            "o": (self.num_heads * d, hidden),
            "gate_up": (hidden, 2 * inner),
            "down": (inner, hidden),
        }
        widths = {name: d if name in ("q_norm", "k_norm") else hidden for name in NORMS}
        rotations = self.cos_sin.shape
        for index, layer in enumerate(self.layers):
            for name, width in widths.items():
                if (weight := getattr(layer, name)) is not None:
                    checks.tensor(f"{name} of layer {index}", weight, dtype, (width,))
            for name in self.linear_names(layer):
                packed, size = getattr(layer, name), features[name]
                if (packed.in_features, packed.out_features) != size:
                    raise ValueError(f"{name} of layer {index} is not {size[0]} -> {size[1]} features")
            if layer.moe is not None and layer.moe.hidden != hidden:
                raise ValueError(f"the experts of layer {index} are for {layer.moe.hidden} features, not {hidden}")
            for name, values, shape_ in (
                ("sinks", layer.sinks, (self.num_heads,)),
                ("cos_sin", layer.cos_sin, tuple(rotations)),
            ):
                if values is not None:
                    checks.tensor(f"{name} of layer {index}", values, torch.float32, shape_)
            if layer.gate not in (SILU, GELU):
                raise ValueError(f"gate of layer {index} is {layer.gate!r}: it must be {SILU} or {GELU}")
            if layer.sliding_window < 0:
                raise ValueError(f"sliding_window of layer {index} is {layer.sliding_window}")
        return hidden, shape

    def check_packing(self, dtype: torch.dtype) -> None:
        """Raise ValueError unless each weight was packed for its use and for activations of `dtype`."""
        for layer in self.layers:
            for name in self.linear_names(layer):
                packed = getattr(layer, name)
                if packed.gate_up != (name == "gate_up") or packed.dtype is not dtype:
                    raise ValueError(f"{name} was packed for another use or another dtype")

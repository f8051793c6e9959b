"""A decoder's layers and their KV caches, checked once when they are put together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import checks
from quire.kernels.moe import GELU, SILU
from quire.kernels.ops import AllReduceGroup, DecoderLayer

# The norms of a layer; all but the first two may be None.
NORMS = ("input_norm", "mlp_norm", "q_norm", "k_norm", "v_norm", "post_attention_norm", "post_mlp_norm")
OF_HEADS = ("q_norm", "k_norm", "v_norm")


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
class Stack:
    """The layers of a decoder with their caches. Fields as the arguments of `Ops.stack_layers`."""

    kv_cache: Sequence[tuple[Tensor, Tensor]]
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
    def max_inner(self) -> int:
        """The most inner features of an MLP that is no mixture of experts; 0 without such MLPs."""
        return max((layer.down.in_features for layer in self.layers if layer.down is not None), default=0)

    @property
    def input_width(self) -> int:
        """The features of the input that each layer has for a token; 0 if no layer has one."""
        ends = (layer.per_layer_input for layer in self.layers)
        return next((end.gate.out_features for end in ends if end is not None), 0)

    @staticmethod
    def linear_names(layer: DecoderLayer) -> tuple[str, ...]:
        """Return the names of the linear layers of a layer, without those of its experts."""
        has_mlp = layer.moe is None or layer.expert_norms is not None
        return ("qkv", "o", "gate_up", "down") if has_mlp else ("qkv", "o")

    def shape_of(self, index: int) -> tuple[int, int]:
        """Return the kv heads of a layer's cache, and the dimensions of a head."""
        return self.kv_cache[index][0].shape[1], self.tables_of(index).shape[1]

    def tables_of(self, index: int) -> Tensor:
        """Return the rotations of a layer."""
        own = self.layers[index].cos_sin
        return self.cos_sin if own is None else own

    def check(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> int:
        """Return the hidden size.

        dtype: of weights and activations; kv_dtype: of the caches, `dtype` if None.
        Raises ValueError or TypeError if shapes or dtypes do not fit together.
        """
        if not self.layers or len(self.layers) != len(self.kv_cache):
            raise ValueError(f"{len(self.layers)} layers and {len(self.kv_cache)} caches do not make a stack")
        hidden = self.layers[0].qkv.in_features
        checks.tensor("final_norm", self.final_norm, dtype, (hidden,))
        if not self.softcap >= 0 or not self.scale > 0:
            raise ValueError(f"softcap is {self.softcap}, scale is {self.scale}")
        if self.layers[0].shares_kv:
            raise ValueError("layer 0 has no earlier layer whose cache it could share")
        blocks_and_size = None
        for index, (layer, (k, v)) in enumerate(zip(self.layers, self.kv_cache, strict=True)):
            kv_heads = self.num_kv_heads if index == 0 else None
            shape = checks.caches(k, v, kv_heads, kv_dtype or dtype)
            blocks_and_size = blocks_and_size or (shape[0], shape[2])
            if (shape[0], shape[2]) != blocks_and_size:
                raise ValueError(f"the caches of layer {index} do not have the blocks of those of layer 0")
            self._check_layer(index, layer, dtype, hidden, shape[1], shape[3])
        return hidden

    def _check_layer(
        self, index: int, layer: DecoderLayer, dtype: torch.dtype, hidden: int, kv_heads: int, d: int
    ) -> None:
        if self.num_heads % kv_heads:
            raise ValueError(f"{self.num_heads} heads and {kv_heads} kv heads of layer {index} do not fit")
        kv_rows = 0 if layer.shares_kv else 2 * kv_heads
        inner = layer.down.in_features if layer.down is not None else 0
        features = {
            "qkv": (hidden, (self.num_heads + kv_rows) * d),
            "o": (self.num_heads * d, hidden),
            "gate_up": (hidden, 2 * inner),
            "down": (inner, hidden),
        }
        norms = {name: getattr(layer, name) for name in NORMS}
        linears = {name: getattr(layer, name) for name in self.linear_names(layer)}
        if (own := layer.expert_norms) is not None:
            norms |= {f"expert_norms.{name}": getattr(own, name) for name in vars(own)}
        if (end := layer.per_layer_input) is not None:
            width = self.input_width
            norms["per_layer_input.norm"] = end.norm
            linears |= {"per_layer_input.gate": end.gate, "per_layer_input.projection": end.projection}
            features |= {"per_layer_input.gate": (hidden, width), "per_layer_input.projection": (width, hidden)}
        for name, weight in norms.items():
            if weight is not None:
                checks.tensor(f"{name} of layer {index}", weight, dtype, (d if name in OF_HEADS else hidden,))
        for name, packed in linears.items():
            size = features[name]
            if packed is None or (packed.in_features, packed.out_features) != size:
                raise ValueError(f"{name} of layer {index} is not {size[0]} -> {size[1]} features")
        if layer.moe is not None and layer.moe.hidden != hidden:
            raise ValueError(f"the experts of layer {index} are for {layer.moe.hidden} features, not {hidden}")
        if layer.moe is None and layer.expert_norms is not None:
            raise ValueError(f"layer {index} has norms of experts, and no experts")
        if layer.sinks is not None:
            checks.tensor(f"sinks of layer {index}", layer.sinks, torch.float32, (self.num_heads,))
        checks.tensor(f"cos_sin of layer {index}", self.tables_of(index), torch.float32, (len(self.cos_sin), d))
        if layer.gate not in (SILU, GELU):
            raise ValueError(f"gate of layer {index} is {layer.gate!r}: it must be {SILU} or {GELU}")
        if layer.sliding_window < 0:
            raise ValueError(f"sliding_window of layer {index} is {layer.sliding_window}")

    def check_packing(self, dtype: torch.dtype) -> None:
        """Raise ValueError unless each weight was packed for its use and for activations of `dtype`."""
        for layer in self.layers:
            for name in self.linear_names(layer):
                packed = getattr(layer, name)
                if packed.gate_up != (name == "gate_up") or packed.dtype is not dtype:
                    raise ValueError(f"{name} was packed for another use or another dtype")

    def check_inputs(self, layer_inputs: Tensor | None, tokens: int, dtype: torch.dtype) -> None:
        """Check the argument `layer_inputs` of `Ops.decoder_layers`. Raises ValueError or TypeError."""
        if (width := self.input_width) and layer_inputs is None:
            raise ValueError("layer_inputs is missing: layers have inputs of their own")
        if layer_inputs is not None:
            checks.tensor("layer_inputs", layer_inputs, dtype, (tokens, len(self.layers), width))

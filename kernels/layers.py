"""The layers of a decoder, written with the single operations: what every `decoder_layers` computes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import checks
from quire.kernels.ops import AllReduceGroup, DecoderLayer, Ops


class _WithCaches:
    kv_cache: Sequence[tuple[Tensor, Tensor]]

    @property
    def num_blocks(self) -> int:
        return self.kv_cache[0][0].shape[0]

    @property
    def block_shape(self) -> tuple[int, ...]:
        """[layers, 2 (k, v), H_kv, block_size, D]: all that the caches hold in one block."""
        return len(self.kv_cache), 2, *self.kv_cache[0][0].shape[1:]

    def check_caches(self, kv_heads: int | None, dtype: torch.dtype) -> torch.Size:
        """Returns the shape of each cache. Raises ValueError or TypeError, as the operations do."""
        shapes = [checks.caches(k, v, kv_heads, dtype) for k, v in self.kv_cache]
        if not shapes:
            raise ValueError("a stack has at least one layer")
        for index, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ValueError(f"the caches of layer {index} are not like those of layer 0")
        return shapes[0]


@dataclass(frozen=True)
class Caches(_WithCaches):
    """The caches of all layers, without the layers."""

    kv_cache: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Stack(_WithCaches):
    layers: Sequence[DecoderLayer]
    final_norm: Tensor
    kv_cache: Sequence[tuple[Tensor, Tensor]]
    cos_sin: Tensor
    num_heads: int
    num_kv_heads: int
    eps: float
    scale: float
    ranks: AllReduceGroup | None = None

    def check(self, dtype: torch.dtype) -> tuple[int, torch.Size]:
        """Returns the hidden size and the shape of each cache. Raises ValueError or TypeError, as the operations do."""
        if not self.layers or len(self.layers) != len(self.kv_cache):
            raise ValueError(f"{len(self.layers)} layers and {len(self.kv_cache)} caches do not make a stack")
        hidden, inner = self.layers[0].qkv.in_features, self.layers[0].down.in_features
        shape = self.check_caches(self.num_kv_heads, dtype)
        d = shape[3]
        checks.tensor("final_norm", self.final_norm, dtype, (hidden,))
        checks.tensor("cos_sin", self.cos_sin, torch.float32, (self.cos_sin.shape[0], d))
        if self.num_heads % self.num_kv_heads or not self.scale > 0:
            raise ValueError(f"{self.num_heads} heads, {self.num_kv_heads} kv heads, scale {self.scale} do not fit")
        features = {
            "qkv": (hidden, (self.num_heads + 2 * self.num_kv_heads) * d),
            "o": (self.num_heads * d, hidden),
            "gate_up": (hidden, 2 * inner),
            "down": (inner, hidden),
        }
        widths = {"input_norm": hidden, "mlp_norm": hidden, "q_norm": d, "k_norm": d}
        for index, layer in enumerate(self.layers):
            for name, width in widths.items():
                if (weight := getattr(layer, name)) is not None:
                    checks.tensor(f"{name} of layer {index}", weight, dtype, (width,))
            for name, size in features.items():
                packed = getattr(layer, name)
                if (packed.in_features, packed.out_features) != size:
                    raise ValueError(f"{name} of layer {index} is not {size[0]} -> {size[1]} features")
            if layer.sliding_window < 0:
                raise ValueError(f"sliding_window of layer {index} is {layer.sliding_window}")
        return hidden, shape


def run(
    ops: Ops,
    residual: Tensor,
    stack: Stack,
    positions: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    rows: Tensor,
) -> Tensor:
    checks.tensor("rows", rows, torch.int64, (rows.shape[0],))
    eps = stack.eps
    all_reduce = stack.ranks.all_reduce if stack.ranks else identity
    hidden = ops.rms_norm(residual, stack.layers[0].input_norm, eps)
    last = len(stack.layers) - 1
    for index, (layer, (k_cache, v_cache)) in enumerate(zip(stack.layers, stack.kv_cache, strict=True)):
        qkv = ops.linear(hidden, layer.qkv)
        heads = stack.num_heads, stack.num_kv_heads
        norms = layer.q_norm, layer.k_norm, eps
        q = ops.rope_and_cache(qkv, positions, stack.cos_sin, slot_mapping, k_cache, v_cache, *heads, *norms)
        tables = block_tables, seq_lens, query_start_loc
        hidden = ops.paged_attention(q, k_cache, v_cache, *tables, stack.scale, layer.sliding_window)
        if index == last:  # no token attends to what follows: only the wanted rows go on
            hidden, residual = hidden[rows], residual[rows]
        hidden = all_reduce(ops.linear(hidden, layer.o))
        hidden = ops.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
        hidden = all_reduce(ops.linear(ops.linear_silu_mul(hidden, layer.gate_up), layer.down))
        next_norm = stack.final_norm if index == last else stack.layers[index + 1].input_norm
        hidden = ops.add_rms_norm(hidden, residual, next_norm, eps)
    return hidden


def identity(values: Tensor) -> Tensor:
    """The all-reduce of layers that one process holds alone."""
    return values

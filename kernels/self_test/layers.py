"""Cases of a whole decoder layer: its parts together, with adapters, and the moves of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.lora import NO_ADAPTER, AdapterBatch, LoraPart
from quire.kernels.moe import SILU, ExpertNorms, PackedMoE
from quire.kernels.ops import LayerStack, Ops, PackedLinear, PerLayerInput
from quire.kernels.reference import ReferenceOps, indexable
from quire.kernels.self_test.attention import AttentionInputs, Sequences, fit
from quire.kernels.self_test.cases import KernelCase
from quire.kernels.self_test.inputs import CaseInputs
from quire.kernels.uses import AttentionUse, KernelUses

# In units of the type of activations: each part rounds, and a difference passes through all later parts. A key next to
# the middle of two numbers of a narrow cache may become either.
TOLERANCE = 32
NARROW = {1: 0.5, 2: 2.0**-6}  # by the bytes of a value in the cache
MOST_HIDDEN = 256  # features of the layer; its heads are the model's
STEP: Sequences = [(40, 1), (17, 5), (33, 33), (150, 30)]
DECODES: Sequences = [(40, 1), (17, 1), (150, 1)]
RANK = 8


@dataclass(slots=True)
class RandomLayer:
    """A `quire.kernels.ops.DecoderLayer` with random weights."""

    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    sliding_window: int
    o: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear | None
    down: PackedLinear | None
    gate: str = SILU
    moe: PackedMoE | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None
    sinks: Tensor | None = None
    cos_sin: Tensor | None = None
    v_norm: Tensor | None = None
    shares_kv: bool = False
    expert_norms: ExpertNorms | None = None
    per_layer_input: PerLayerInput | None = None
    output_scale: float = 1.0
    uses_key_ends: bool = False


class LayerInputs:
    """A layer with the heads of a use, the sequences of a step in its cache, and the hidden states of the step."""

    def __init__(self, inputs: CaseInputs, use: AttentionUse, uses: KernelUses, sequences: Sequences) -> None:
        self.use, self._gate, ops = use, uses.gate, inputs.ops
        self.hidden = min(uses.hidden, MOST_HIDDEN)
        self.step = AttentionInputs(inputs, use, uses.block_size, fit(sequences, uses.max_model_len))
        generator = inputs.generator(self.hidden)
        heads, kv_heads, d = use.heads, use.kv_heads, use.head_dim
        shapes = {
            "qkv": ((heads + 2 * kv_heads) * d, self.hidden),
            "o": (self.hidden, heads * d),
            "gate_up": (2 * self.hidden, self.hidden),
            "down": (self.hidden, self.hidden),
        }
        self.weights = {
            name: (inputs.normal(n, k, generator=generator, dtype=torch.float32) / k**0.5).to(ops.dtype)
            for name, (n, k) in shapes.items()
        }
        self.norms = [inputs.normal(self.hidden, generator=generator) * 0.1 + 1 for _ in range(3)]
        self.head_norms = [inputs.normal(d, generator=generator) * 0.1 + 1 for _ in range(2)] if use.has_norms else []
        tokens = sum(self.step.counts)
        self.residual = inputs.normal(tokens, self.hidden, generator=generator)
        self.cos_sin = inputs.angles(max(self.step.lengths), d // 2, generator)
        at = [
            position for length, count in self.step.sequences for position in range(length - count, length)
        ]  # of the tokens of the step
        self.positions = inputs.integers(at)
        self.slots = self.step.slots[self.step.tokens]
        # The last token of each sequence.
        self.rows = inputs.integers(self.step.counts, torch.int64).cumsum(0).sub(1)

        def part(n: int, k: int, offset: int = 0) -> LoraPart:
            a = inputs.normal(RANK, k, generator=generator, dtype=torch.float32) / k**0.5
            b = inputs.normal(n, RANK, generator=generator, dtype=torch.float32) / RANK**0.5
            gains = inputs.normal(2, n, generator=generator, dtype=torch.float32) * 0.1
            gains[0] += 1
            return LoraPart(a, b, 1.0, offset, gains)

        halves = [part(self.hidden, self.hidden), part(self.hidden, self.hidden, self.hidden)]  # gates, and ups
        self.adapter = {name: [part(*shape)] for name, shape in shapes.items()} | {"gate_up": halves}

    def stack(self, ops: Ops, caches: tuple[Tensor, Tensor]) -> LayerStack:
        """Make the layer of `ops`."""

        def pack(name: str) -> PackedLinear:
            function = ops.pack_gate_up if name == "gate_up" else ops.pack_linear
            return function(self.weights[name].to(ops.dtype))

        first, second, last = (norm.to(ops.dtype) for norm in self.norms)
        q_norm, k_norm = (norm.to(ops.dtype) for norm in self.head_norms) if self.head_norms else (None, None)
        use = self.use
        layer = RandomLayer(
            first, pack("qkv"), q_norm, k_norm, use.window, pack("o"), second, pack("gate_up"), pack("down"),
            self._gate, sinks=self.step.sinks,
        )  # fmt: skip
        heads = use.heads, use.kv_heads
        return ops.stack_layers([layer], last, [caches], self.cos_sin, *heads, 1e-5, use.scale, softcap=use.softcap)

    def adapters(self, ops: Ops) -> AdapterBatch:
        """Return a batch whose second and later sequences use the adapter."""
        tokens = np.array(
            [NO_ADAPTER if s == 0 else 0 for s, count in enumerate(self.step.counts) for _ in range(count)],
            dtype=np.int32,
        )
        packed = ops.pack_adapter([self.adapter], self.hidden)
        return AdapterBatch([packed], tokens, tokens[self.rows.cpu().numpy()])

    def compute(self, ops: Ops, has_adapters: bool = False) -> Sequence[Tensor]:
        """Compute the step with `ops`: the output of the last token of each sequence."""
        adapters = self.adapters(ops) if has_adapters else None
        stack, residual = self.stack(ops, self.step.caches_of(ops)), self.residual.to(ops.dtype, copy=True)
        at = self.positions, self.slots, *self.step.tables, self.rows
        return [ops.decoder_layers(residual, stack, *at, adapters)]


def layer_cases(inputs: CaseInputs, uses: KernelUses) -> Iterator[KernelCase]:
    """Yield the cases of a layer with the heads of each use."""
    wide = _wide(inputs.ops)
    for use in uses.attention:
        layer = LayerInputs(inputs, use, uses, STEP)
        for has_adapters in (False, True) if uses.has_adapters else (False,):
            yield _case(inputs, layer, wide, has_adapters)


def layer_case(
    inputs: CaseInputs, use: AttentionUse, uses: KernelUses, sequences: Sequences, name: str, kernel: str
) -> KernelCase:
    """Return the case of a layer with the heads of a use, for a step of these sequences."""
    return _case(inputs, LayerInputs(inputs, use, uses, sequences), _wide(inputs.ops), False, name, kernel)


def _wide(ops: Ops) -> ReferenceOps:
    return ReferenceOps(ops.device, torch.float32, None if ops.kv_dtype is ops.dtype else ops.kv_dtype)


def _case(
    inputs: CaseInputs,
    layer: LayerInputs,
    wide: ReferenceOps,
    has_adapters: bool,
    name: str = "layer",
    kernel: str = "layers",
) -> KernelCase:
    ops = inputs.ops
    narrow = 0.0 if ops.kv_dtype is ops.dtype else NARROW.get(ops.kv_dtype.itemsize, 0.0)
    return KernelCase(
        "layer with adapters" if has_adapters else name,
        "lora" if has_adapters else kernel,
        f"{layer.use}, {inputs.types}",
        lambda: layer.compute(ops, has_adapters),
        lambda: layer.compute(wide, has_adapters),
        max(TOLERANCE * inputs.unit, narrow),
    )


def block_cases(inputs: CaseInputs, use: AttentionUse, block_size: int) -> Iterator[KernelCase]:
    """Yield the case of copies of blocks: within the caches, to the host and back."""
    ops, ids = inputs.ops, [torch.tensor(numbers, device="cpu") for numbers in ([0, 1], [4, 2], [2, 0], [3, 1])]

    def moved(copy: Callable[[list[Tensor]], None]) -> Sequence[Tensor]:
        caches = [ops.alloc_kv_cache(5, use.kv_heads, block_size, use.head_dim) for _ in range(2)]
        flat = [cache for pair in caches for cache in pair]
        for number, cache in enumerate(flat):
            values = torch.arange(cache.numel(), device=ops.device) + number
            indexable(cache).copy_((values % 113).view(cache.shape))
        copy(flat)
        return [indexable(cache).float() for cache in flat]

    def by_kernels(flat: list[Tensor]) -> None:
        stack = ops.stack_caches([(flat[0], flat[1]), (flat[2], flat[3])])
        host = ops.alloc_host_blocks(stack, 3)
        ops.copy_blocks(stack, ids[0], ids[1])
        ops.swap_out(stack, host, ids[1], ids[2])
        ops.swap_in(stack, host, ids[2], ids[3])

    def by_torch(flat: list[Tensor]) -> None:
        for cache in map(indexable, flat):
            for source, target in ((ids[0], ids[1]), (ids[1], ids[3])):
                cache[target.to(cache.device)] = cache[source.to(cache.device)]

    yield KernelCase(
        "copies of blocks",
        "block_mover",
        f"{use.kv_heads} heads of {use.head_dim}, blocks of {block_size}, {inputs.types}",
        lambda: moved(by_kernels),
        lambda: moved(by_torch),
        0.0,
    )

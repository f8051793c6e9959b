"""The kernels that a model uses: the shapes and the variants that the self-test covers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire.kernels.moe import SILU, PackedMoE, Routing
from quire.kernels.ops import PackedLinear

PLAIN = ""


@dataclass(frozen=True)
class AttentionUse:
    """The attention of some layers, on this rank. Arguments as of `Ops.paged_attention`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_norms: bool = False  # of q and k, before the rotation
    has_v_norm: bool = False
    # In steps with images. The name of a use leaves it out, so that the inputs of other steps do not depend on it.
    has_key_ends: bool = field(default=False, repr=False)

    def __str__(self) -> str:
        parts = [f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"]
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"soft cap {self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] if self.has_sinks else []
        parts += ["norms"] if self.has_norms else []
        parts += ["a norm of values"] if self.has_v_norm else []
        parts += ["ends of keys"] if self.has_key_ends else []
        return ", ".join(parts)


@dataclass(frozen=True)
class LinearUse:
    """A linear layer.

    kind: PLAIN for weights in the type of activations, "bfloat16" or "float16" for another floating type, "int8" or
    "int4" for `QuantizedWeight`, or a kind of `GroupedWeight`.
    """

    in_features: int
    out_features: int
    kind: str = PLAIN
    is_gate_up: bool = False
    has_bias: bool = False

    @classmethod
    def of(cls, packed: PackedLinear) -> LinearUse:
        """Return the use of weights of `Ops.pack_linear` or `Ops.pack_gate_up`."""
        return cls(
            packed.in_features,
            packed.out_features,
            _kind(packed),
            bool(getattr(packed, "gate_up", False)),
            getattr(packed, "bias", None) is not None,
        )

    def __str__(self) -> str:
        parts = [f"{self.in_features} -> {self.out_features}", self.kind, "bias" if self.has_bias else ""]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class ExpertsUse:
    """A mixture of experts. kind: PLAIN for weights in the type of activations, or a kind of `GroupedWeight`."""

    hidden: int
    inner: int
    routing: Routing
    has_biases: bool = False
    kind: str = PLAIN

    @classmethod
    def of(cls, packed: PackedMoE, has_biases: bool) -> ExpertsUse:
        """Return the use of experts of `Ops.pack_moe`."""
        return cls(packed.hidden, packed.inner, packed.routing, has_biases, getattr(packed, "kind", PLAIN))

    def __str__(self) -> str:
        routing = self.routing
        shape = f"{routing.top_k} of {routing.num_experts} experts of {self.hidden} -> {self.inner}"
        return ", ".join(filter(None, [shape, self.kind]))


@dataclass(frozen=True)
class KernelUses:
    """All that a model uses. The types are those of its operations."""

    hidden: int
    vocab_size: int
    max_model_len: int
    block_size: int
    attention: tuple[AttentionUse, ...] = ()
    linears: tuple[LinearUse, ...] = ()
    head: LinearUse | None = None  # the layer that gives logits
    experts: tuple[ExpertsUse, ...] = ()
    embedding_dtype: torch.dtype | None = None  # of the table that `Ops.embed` reads; None: it reads none
    has_norms: bool = True  # RMS norms of the hidden states
    is_stack: bool = True  # `Ops.decoder_layers` computes all layers
    has_adapters: bool = False  # of `Ops.decoder_layers`
    gate: str = SILU


def _kind(packed: PackedLinear) -> str:
    """Return the kind of packed weights, whatever implementation packed them."""
    if isinstance(kind := getattr(packed, "kind", None), str):
        return kind
    if (stored := getattr(packed, "format", None)) is not None:  # of the C++ kernels
        name = str(stored.name).lower()
        return PLAIN if name == "words" else name
    if (bits := getattr(getattr(packed, "weight", None), "bits", None)) is not None:
        return f"int{bits}"
    return PLAIN

"""The layout of quantised checkpoints: a format names its quantised layers, and the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.weights import FP8, INT4_GROUP
from quire.shared.model.fields import Fields
from quire.worker.models.files.quantized.weight import ScaledWeight, StoredWeight

E4M3, E8M0 = "F8_E4M3", "F8_E8M0"
FLOATS = ("F16", "BF16", "F32")  # types of scales, as safetensors names them
# Fields of AutoRound, in its own format and in those of others: how the weights were found, and other than weights.
AUTO_ROUND_FIELDS = (
    "provider", "autoround_version", "enable_quanted_input", "to_quant_block_names", "block_name_to_quantize", "iters",
    "nsamples", "seqlen", "lr", "minmax_lr", "amp", "batch_size", "gradient_accumulate_steps", "low_gpu_mem_usage",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "scale_dtype", "supported_types", "quant_block_list", "dataset",
    "act_bits", "act_group_size", "act_sym", "act_data_type", "act_dynamic", "static_kv_dtype", "backend",
    "static_kv_granularity", "static_attention_dtype", "static_attention_granularity", "modules_to_not_convert",
    "use_quant_input", "disable_quanted_input", "not_use_best_mse", "dynamic_max_gap", "sampler", "quant_lm_head",
)  # fmt: skip
# Returns the type of a stored tensor, as safetensors names it; None if the checkpoint does not have the tensor.
StoredType = Callable[[str], str | None]
# Returns the shape of a tensor of the layer by the end of its name, such as "qweight"; None if it is absent.
StoredShape = Callable[[str], tuple[int, ...] | None]
# Returns a tensor of the layer by the end of its name, such as "qweight"; None if it is optional and absent.
Load = Callable[[str], Tensor | None]


class TensorFault(Exception):
    """A tensor of a layer that cannot be honoured: the end of its name, the fault and the remedy."""

    def __init__(self, end: str, what: str, remedy: str) -> None:
        super().__init__(end, what, remedy)
        self.end, self.what, self.remedy = end, what, remedy


@dataclass(frozen=True)
class Stored:
    """The permitted types and shapes of a tensor.

    holds: the values that it must have; None: any. most: the bytes of a text, whose shape is free; 0: no text.
    """

    types: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False
    holds: tuple[int, ...] | None = None
    most: int = 0


class LayerLayout(Protocol):
    """The tensors of one linear layer, and how weights are read from them."""

    @property
    def label(self) -> str:
        """Bits and groups for the log, such as "4 bits in groups of 128"."""

    @property
    def stored_as(self) -> str:
        """The value of --quantization that keeps these weights as they are stored; "": no value does."""

    @property
    def scale(self) -> str:
        """The end of the name of the tensor of scales."""

    @property
    def integer_bits(self) -> int:
        """Bits of weights if the format multiplies them with activations that are rounded to 8 bits; else 0."""

    def row_unit(self, k: int) -> int:
        """Return how many output channels share a word or a block of scales: rows are read from a multiple of it on.

        k: input features.
        """

    def shape(self, stored_shape: StoredShape, load: Load) -> tuple[int, int]:
        """Return [n, k] of the weights of a layer: by the shapes of its tensors, or by a text. Raises TensorFault."""

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        """Return the tensors of a layer with weights [n, k] by the ends of their names."""

    def weight(self, n: int, k: int, load: Load) -> StoredWeight:
        """Read the weights, or n rows of them if `load` returns the tensors of these. Raises TensorFault."""


class Quantization(Protocol):
    """A parsed `quantization_config`."""

    @property
    def label(self) -> str:
        """The format for the log and for errors."""

    @property
    def stored_as(self) -> str:
        """The value of --quantization that keeps all quantised layers as they are stored; "": no value does."""

    @property
    def rounds_activations(self) -> bool:
        """True if activations are rounded to 8 bits, as the integer kernels do, for some layers."""

    def layer(self, name: str, stored_type: StoredType) -> LayerLayout | None:
        """Return the layout of the linear layer `name`, such as `model.layers.0.mlp.up_proj`; None: not quantised.

        Raises CheckpointError if the configuration contradicts the tensors.
        """


def integers_stored_as(bits: int, group_size: int, has_plain_order: bool) -> str:
    """Return the value of --quantization whose layout holds symmetric integers; "": none does.

    group_size: 0 for one scale per channel. has_plain_order: neighbouring input features share a group.
    """
    if not has_plain_order:
        return ""
    if bits == 8:
        return "" if group_size else "int8"
    return "" if group_size % INT4_GROUP else "int4"


def refuse_unknown(fields: Fields, known: Collection[str]) -> None:
    """Raise CheckpointError for a field that is neither known nor empty: it may change what the tensors mean."""
    for name in fields.names():
        value = fields.get(name)
        if name not in known and not (value is None or value is False or value in ([], {}, "")):
            raise fields.fault(name, "no such field; use a checkpoint without it, or the one it was made from")


def matrix_shape(stored_shape: StoredShape, end: str) -> tuple[int, int]:
    """Return the shape of a tensor with two dimensions. Raises TensorFault."""
    shape = stored_shape(end)
    if shape is None or len(shape) != 2:
        what = "is missing" if shape is None else f"has the shape {list(shape)}, expected two dimensions"
        raise TensorFault(end, what, "quantization_config must describe these weights")
    return shape[0], shape[1]


def required(load: Load, end: str) -> Tensor:
    """Load a tensor that `tensors` does not call optional."""
    tensor = load(end)
    assert tensor is not None
    return tensor


def layout_of_qweight(layout: LayerLayout, name: str, stored_type: StoredType) -> LayerLayout | None:
    """Return `layout` for the linear layer `name`, or None if it is stored plainly: with a `weight`, no `qweight`."""
    if stored_type(f"{name}.qweight") is not None:
        return layout
    # A tied lm_head has no tensor. The reader refuses any other layer without tensors, by their names.
    return None if name == "lm_head" or stored_type(f"{name}.weight") is not None else layout


def num_groups(k: int, group_size: int) -> int:
    """Return the number of groups of k input features. group_size 0: one group of all."""
    return -(-k // group_size) if group_size else 1


def group_order(g_idx: Tensor | None, end: str, k: int, group_size: int) -> Tensor | None:
    """Return the group of each of k input features, or None if neighbours share a group.

    g_idx: the tensor whose name ends with `end`, or None. Raises TensorFault for a group that does not exist.
    """
    if g_idx is None or torch.equal(g_idx.long(), torch.arange(k) // (group_size or k)):
        return None
    groups = num_groups(k, group_size)
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        what = f"has values from {int(g_idx.min())} to {int(g_idx.max())}, expected groups from 0 to {groups - 1}"
        raise TensorFault(end, what, "quantise the model again")
    return g_idx.long()


@dataclass(frozen=True)
class Fp8Layer:
    """A layer of FP8 numbers.

    block: output channels and input features that share a scale; empty: as the tensor of scales shows.
    """

    scale: str
    block: tuple[int, ...] = ()
    stored_as: str = FP8
    integer_bits: int = 0

    @property
    def label(self) -> str:
        return f"FP8 in blocks of {self.block[0]}x{self.block[1]}" if self.block else "FP8 per channel or tensor"

    def row_unit(self, k: int) -> int:
        return self.block[0] if self.block else 1

    def shape(self, stored_shape: StoredShape, load: Load) -> tuple[int, int]:
        return matrix_shape(stored_shape, "weight")

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        shapes: tuple[tuple[int, ...], ...] = ((n, 1), (n,), (), (1,), (1, 1))
        if self.block:
            shapes = ((-(-n // self.block[0]), -(-k // self.block[1])),)
        return {"weight": Stored((E4M3,), ((n, k),)), self.scale: Stored((*FLOATS, E8M0), shapes)}

    def weight(self, n: int, k: int, load: Load) -> ScaledWeight:
        scales = required(load, self.scale)
        return ScaledWeight(required(load, "weight"), *scale_blocks(scales, n, k, self.block))


def scale_blocks(scales: Tensor, n: int, k: int, block: tuple[int, ...]) -> tuple[Tensor, tuple[int, int]]:
    """Return scales as a matrix with an entry per block, and the size of a block."""
    if block:
        return scales, (block[0], block[1])
    return scales.reshape(-1, 1), (1 if scales.numel() == n else n, k)

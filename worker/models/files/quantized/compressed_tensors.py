"""compressed-tensors: `quant_method` compressed-tensors, as LLM Compressor writes it.

A configuration has groups of layers; each says how weights and activations are rounded. Read are int-quantized (int8),
pack-quantized (4 or 8 bits in words of 32, less half of their range) and float-quantized (FP8).
weight[n, k] = (value[n, k] - zero[n, j]) * weight_scale[n, j], with one j per channel, group or block.
nvfp4-pack-quantized and mxfp4-pack-quantized have the layouts of `nvfp4` and `mxfp4`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.shared.model.fields import Fields
from quire.worker.models.files.layer_names import ALL, LayerNames, PatternError
from quire.worker.models.files.quantized.layout import (
    FLOATS,
    Fp8Layer,
    LayerLayout,
    Load,
    Stored,
    StoredShape,
    StoredType,
    group_order,
    integers_stored_as,
    matrix_shape,
    num_groups,
    refuse_unknown,
    required,
)
from quire.worker.models.files.quantized.mxfp4 import Mxfp4Layer
from quire.worker.models.files.quantized.nvfp4 import compressed_nvfp4
from quire.worker.models.files.quantized.weight import ScaledWeight
from quire.worker.models.files.quantized.words import unpack_columns, unpack_rows
from quire.worker.models.files.tensor_names import layer_spellings

PACKED, INTEGERS, FLOATING, NAIVE, MIXED, NVFP4, MXFP4 = FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)  # fmt: skip
# The strategy and the size of the groups of 4-bit floating-point weights.
FOUR_BITS = {("tensor_group", 16): NVFP4, ("group", 32): MXFP4}
MEANT = ("quant_method", "format", "config_groups", "ignore", "quantization_status", "sparsity_config",
         "transform_config")  # fmt: skip
# The KV cache has the type that the worker's settings say.
NEUTRAL = ("version", "global_compression_ratio", "kv_cache_scheme", "run_compressed", "dequantize")
WEIGHT_FIELDS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
                 "observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # fmt: skip
GROUP_FIELDS = ("targets", "weights", "input_activations", "output_activations", "format")
OTHER = "use a checkpoint of another scheme, or one that is not quantised"


@dataclass(frozen=True)
class IntegerLayer:
    """A layer of integers. group_size 0: a scale per channel, or one for all of the tensor."""

    bits: int
    group_size: int
    symmetric: bool
    per_tensor: bool
    is_packed: bool
    act_order: bool
    integer_bits: int
    scale: str = "weight_scale"

    @property
    def label(self) -> str:
        groups = (
            f"groups of {self.group_size}" if self.group_size else "per tensor" if self.per_tensor else "per channel"
        )
        return f"{self.bits} bits, {groups}" + (", act-order" if self.act_order else "")

    @property
    def stored_as(self) -> str:
        return integers_stored_as(self.bits, self.group_size, not self.act_order) if self.symmetric else ""

    def row_unit(self, k: int) -> int:
        return 32 // self.bits

    def shape(self, stored_shape: StoredShape, load: Load) -> tuple[int, int]:
        n, k = matrix_shape(stored_shape, "weight_packed" if self.is_packed else "weight")
        return n, k * (32 // self.bits) if self.is_packed else k

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        groups, per_word = num_groups(k, self.group_size), 32 // self.bits
        shapes: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1)) if self.per_tensor else ((n, groups),)
        stored = {"weight_scale": Stored(FLOATS, (*shapes, (n,)) if groups == 1 and not self.per_tensor else shapes)}
        if self.is_packed:
            stored["weight_packed"] = Stored(("I32",), ((n, -(-k // per_word)),))
            stored["weight_shape"] = Stored(("I64", "I32"), ((2,),), holds=(n, k))
        else:
            stored["weight"] = Stored(("I8",), ((n, k),))
        if not self.symmetric:
            packed = self.is_packed and not self.per_tensor
            shapes = ((-(-n // per_word), groups),) if packed else stored["weight_scale"].shapes
            stored["weight_zero_point"] = Stored(("I32",) if packed else ("I8",), shapes)
        if self.act_order:
            stored["weight_g_idx"] = Stored(("I32", "I64"), ((k,),))
        return stored

    def weight(self, n: int, k: int, load: Load) -> ScaledWeight:
        if self.is_packed:
            values = unpack_columns(required(load, "weight_packed"), self.bits, k)
        else:
            values = required(load, "weight")
        scales = required(load, "weight_scale")
        scales = scales.reshape(1 if self.per_tensor else n, -1)
        zeros = None if self.symmetric else self._zeros(required(load, "weight_zero_point"), n).reshape(scales.shape)
        size = self.group_size or k
        g_idx = required(load, "weight_g_idx") if self.act_order else None
        groups = group_order(g_idx, "weight_g_idx", k, self.group_size)
        return ScaledWeight(values, scales, (n if self.per_tensor else 1, size), zeros, groups, self.bits)

    def _zeros(self, stored: Tensor, n: int) -> Tensor:
        if stored.dtype is torch.int32:  # packed along the output channels
            stored = unpack_rows(stored, self.bits, n).T.contiguous()
        return stored.to(torch.int16)


@dataclass(frozen=True)
class CompressedTensors:
    """A checkpoint."""

    label: str
    ignored: LayerNames
    groups: tuple[tuple[LayerNames, LayerLayout], ...]

    @property
    def stored_as(self) -> str:
        kinds = {layout.stored_as for _, layout in self.groups}
        return kinds.pop() if len(kinds) == 1 else ""

    @property
    def rounds_activations(self) -> bool:
        return any(layout.integer_bits for _, layout in self.groups)

    def layer(self, name: str, stored_type: StoredType) -> LayerLayout | None:
        # Lists have the names of modules, which other versions of Transformers than the writer of the tensors gave.
        spellings = layer_spellings(name)
        if any(map(self.ignored.match, spellings)):
            return None
        matches = ((max(map(names.match, spellings)), layout) for names, layout in self.groups)
        closeness, layout = max(matches, key=lambda pair: pair[0])
        return layout if closeness else None


def read_compressed_tensors(fields: Fields) -> CompressedTensors:
    """Parse the fields of a `quantization_config`. Raises CheckpointError."""
    refuse_unknown(fields, (*MEANT, *NEUTRAL))
    whole = _format(fields, "format", None)
    if fields.get("quantization_status", "compressed") != "compressed":
        raise fields.fault("quantization_status", "compressed; save the model with save_compressed=True")
    sparsity = fields.section("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise sparsity.fault("format", f"dense; {OTHER}")
    transforms = fields.section("transform_config")
    if transforms.get("config_groups"):
        raise transforms.fault("config_groups", f"no rotations of activations; {OTHER}")
    section = fields.section("config_groups")
    if not section.names():
        raise fields.fault("config_groups", "at least one group of layers")
    groups = [_group(section.section(name), whole) for name in section.names()]
    try:
        ignored = LayerNames(_strings(fields, "ignore", []))
    except PatternError as error:
        raise fields.fault("ignore", f"patterns that can be matched fast, but it {error}") from None
    label = f"compressed-tensors {whole or MIXED}"
    return CompressedTensors(label, ignored, tuple(groups))


def _format(fields: Fields, name: str, whole: str | None) -> str | None:
    value = fields.get(name, whole)
    if value is not None and value not in FORMATS:
        raise fields.fault(name, f"{', '.join(FORMATS)}; {OTHER}")
    return None if value == MIXED else value


def _strings(fields: Fields, name: str, default: list[str]) -> list[str]:
    value = fields.get(name, default)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise fields.fault(name, "a list of names of layers")
    return value


def _group(fields: Fields, whole: str | None) -> tuple[LayerNames, LayerLayout]:
    refuse_unknown(fields, GROUP_FIELDS)
    targets = _strings(fields, "targets", [ALL])
    for target in targets:
        if target != ALL and "." not in target and not target.startswith("re:") and target != "lm_head":
            raise fields.fault("targets", f"{ALL}, names of layers and re:EXPRESSION; {OTHER}")
    try:
        names = LayerNames(targets)
    except PatternError as error:
        raise fields.fault("targets", f"patterns that can be matched fast, but it {error}") from None
    if fields.get("output_activations") is not None:
        raise fields.fault("output_activations", f"null; {OTHER}")
    if fields.get("weights") is None:
        raise fields.fault("weights", f"an object that says how weights are rounded; {OTHER}")
    weights, stored = fields.section("weights"), _format(fields, "format", whole)
    refuse_unknown(weights, WEIGHT_FIELDS)
    kind, bits = weights.get("type", "int"), weights.integer("num_bits", 8)
    if weights.get("dynamic"):
        raise weights.fault("dynamic", "false")
    if kind == "float" and bits == 4:
        return names, _fp4_layer(weights, stored)
    if kind == "float":
        if bits != 8 or stored not in (FLOATING, NAIVE, None):
            raise weights.fault("num_bits", f"8 or 4 for floating-point weights, 8 in the format {FLOATING}; {OTHER}")
        return names, _float_layer(weights)
    if kind != "int":
        raise weights.fault("type", f"int or float; {OTHER}")
    if bits not in (4, 8):
        raise weights.fault("num_bits", f"4 or 8; {OTHER}")
    if stored in (FLOATING, NVFP4, MXFP4):
        raise weights.fault("type", f"float, as the format is {stored}")
    return names, _integer_layer(weights, bits, stored == PACKED, fields)


def _integer_layer(weights: Fields, bits: int, is_packed: bool, group: Fields) -> IntegerLayer:
    size, order = weights.integer("group_size", 0, minimum=-1), weights.get("actorder")
    strategy = weights.get("strategy", "group" if size > 0 else "tensor")
    if strategy not in ("tensor", "channel", "group"):
        raise weights.fault("strategy", f"tensor, channel or group; {OTHER}")
    if strategy == "group" and size < 1:
        raise weights.fault("group_size", "a number above 0 with the strategy group")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise weights.fault("actorder", "group, weight or null")
    return IntegerLayer(
        bits=bits,
        group_size=size if strategy == "group" else 0,
        symmetric=weights.flag("symmetric", True),
        per_tensor=strategy == "tensor",
        is_packed=is_packed,
        act_order=strategy == "group" and order in (True, "group", "dynamic"),
        integer_bits=bits if _rounds_rows(group) else 0,
    )


def _rounds_rows(group: Fields) -> bool:
    """Return whether activations are rounded as the kernels do it: to symmetric 8 bits with a scale per token."""
    inputs = group.section("input_activations")
    return (
        inputs.get("type", "int") == "int"
        and inputs.get("num_bits") == 8
        and inputs.get("strategy") == "token"
        and inputs.get("dynamic") is True
        and inputs.get("symmetric", True) is True
    )


def _fp4_layer(weights: Fields, stored: str | None) -> LayerLayout:
    """Return the layout of 4-bit floating-point weights. stored: the format of the group."""
    if not weights.flag("symmetric", True):
        raise weights.fault("symmetric", "true for floating-point weights")
    found = FOUR_BITS.get((str(weights.get("strategy")), weights.integer("group_size", 0, minimum=-1)))
    if found is None or stored not in (found, None):
        wanted = " or ".join(f"{kind} with group_size {size} ({name})" for (kind, size), name in FOUR_BITS.items())
        raise weights.fault("strategy", f"{wanted} for floating-point weights of 4 bits; {OTHER}")
    return compressed_nvfp4() if found == NVFP4 else Mxfp4Layer()


def _float_layer(weights: Fields) -> Fp8Layer:
    strategy, block = weights.get("strategy", "tensor"), weights.get("block_structure")
    if not weights.flag("symmetric", True):
        raise weights.fault("symmetric", "true for floating-point weights")
    if strategy in ("tensor", "channel"):
        return Fp8Layer("weight_scale")
    if strategy == "group":
        return Fp8Layer("weight_scale", (1, weights.integer("group_size")))
    if strategy != "block":
        raise weights.fault("strategy", f"tensor, channel, group or block; {OTHER}")
    if not (isinstance(block, list) and len(block) == 2 and all(type(at) is int and 0 < at < 2**31 for at in block)):
        raise weights.fault("block_structure", "two numbers above 0, such as [128, 128]")
    return Fp8Layer("weight_scale", (block[0], block[1]))

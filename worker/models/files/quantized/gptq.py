"""GPTQ: `quant_method` gptq, as AutoGPTQ and GPTQModel write it, version 1 and 2.

weight[n, k] = (q[k, n] - z[g[k], n]) * scales[g[k], n]. `qweight` packs q along k, and `qzeros` packs z along n, each
into words of 32 bits, the first in the lowest bits. Version 1 stores z - 1: as in GPTQModel, 1 is subtracted from every
integer of a word with borrows between them. With `sym`, z is the middle of the range, whatever is stored: some files
have the zero points of the other version, and other servers do not read them. `g_idx` is the group of each input
feature: with `desc_act` (act-order) neighbours are in different groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.shared.model.fields import Fields
from quire.worker.models.files.quantized.layout import (
    AUTO_ROUND_FIELDS,
    FLOATS,
    LayerLayout,
    Load,
    Stored,
    StoredShape,
    StoredType,
    group_order,
    integers_stored_as,
    layout_of_qweight,
    matrix_shape,
    num_groups,
    refuse_unknown,
    required,
)
from quire.worker.models.files.quantized.weight import ScaledWeight
from quire.worker.models.files.quantized.words import unpack_columns, unpack_rows

MEANT = ("bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "pack_dtype", "dynamic", "activation",
         "quant_method", "method", "is_marlin_format", "rotation", "adapter", "data_type")  # fmt: skip
# How the weights were found, and how other programs compute with them.
NEUTRAL = ("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path", "mse",
           "model_file_base_name", "meta", "tokenizer", "dataset", "block_name_to_quantize", "backend", "batch_size",
           "module_name_preceding_first_block", "pad_token_id", "max_input_length", "model_seqlen", "use_exllama",
           "cache_block_outputs", "modules_in_block_to_quantize", "exllama_config", "use_cuda_fp16", "quantizer",
           "disable_exllama", "act_group_aware", "lm_head", "hyb_act", "v2", "quantization_version")  # fmt: skip


@dataclass(frozen=True)
class GptqLayer:
    """A layer. group_size 0: one group of all input features."""

    bits: int
    group_size: int
    act_order: bool
    is_v1: bool
    symmetric: bool = False
    scale: str = "scales"
    integer_bits: int = 0

    @property
    def label(self) -> str:
        groups = f"groups of {self.group_size}" if self.group_size else "one group per channel"
        return f"{self.bits} bits, {groups}" + (", act-order" if self.act_order else "")

    @property
    def stored_as(self) -> str:
        return integers_stored_as(self.bits, self.group_size, not self.act_order) if self.symmetric else ""

    def row_unit(self, k: int) -> int:
        return 32 // self.bits

    def shape(self, stored_shape: StoredShape, load: Load) -> tuple[int, int]:
        words, n = matrix_shape(stored_shape, "qweight")
        order = stored_shape("g_idx")
        return n, order[0] if order else words * (32 // self.bits)

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        groups, per_word = num_groups(k, self.group_size), 32 // self.bits
        return {
            "qweight": Stored(("I32",), ((-(-k // per_word), n),)),
            "qzeros": Stored(("I32",), ((groups, -(-n // per_word)),)),
            "scales": Stored(FLOATS, ((groups, n),)),
            "g_idx": Stored(("I32", "I64"), ((k,),), optional=not self.act_order),
        }

    def weight(self, n: int, k: int, load: Load) -> ScaledWeight:
        values = unpack_rows(required(load, "qweight"), self.bits, k)
        groups = group_order(load("g_idx"), "g_idx", k, self.group_size)
        scales = required(load, "scales").T.contiguous()
        zeros = None  # `unpack_rows` has subtracted the middle
        if not self.symmetric:
            words = required(load, "qzeros")
            if self.is_v1:
                words = words + (0x11111111 if self.bits == 4 else 0x01010101)  # wraps around in 32 bits
            zeros = unpack_columns(words, self.bits, n).T.to(torch.int16).contiguous()
        return ScaledWeight(values, scales, (1, self.group_size or k), zeros, groups, self.bits)


@dataclass(frozen=True)
class Gptq:
    """A checkpoint. The layers that have a `qweight` are quantised, and the rest is not."""

    layout: GptqLayer
    label: str
    rounds_activations: bool = False

    @property
    def stored_as(self) -> str:
        return self.layout.stored_as

    def layer(self, name: str, stored_type: StoredType) -> LayerLayout | None:
        return layout_of_qweight(self.layout, name, stored_type)


def read_gptq(fields: Fields) -> Gptq:
    """Parse the fields of a `quantization_config`. Raises CheckpointError."""
    refuse_unknown(fields, (*MEANT, *NEUTRAL, *AUTO_ROUND_FIELDS))
    if fields.get("data_type", "int") != "int":
        raise fields.fault("data_type", "int; use a checkpoint of integers, or one that is not quantised")
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise fields.fault("bits", "4 or 8; use a checkpoint of one of these, or one that is not quantised")
    group_size = fields.integer("group_size", -1, minimum=-1)
    if group_size == 0:
        raise fields.fault("group_size", "-1 or a number above 0")
    version = "gptq"
    for name in ("checkpoint_format", "format"):
        version = fields.get(name, version)
        if version not in ("gptq", "gptq_v2"):
            raise fields.fault(name, "gptq or gptq_v2; save the model again in one of these formats")
    if fields.get("pack_dtype", "int32") != "int32":
        raise fields.fault("pack_dtype", "int32; save the model again with it")
    for name in ("is_marlin_format", "rotation", "adapter", "activation"):
        if fields.get(name):
            raise fields.fault(name, "no such field; use the checkpoint that this one was made from")
    dynamic = fields.section("dynamic").names()
    if any(not pattern.startswith("-:") for pattern in dynamic):
        raise fields.fault("dynamic", "only patterns of layers that are not quantised, which start with -:")
    act_order = fields.flag("desc_act", False)
    symmetric = fields.flag("sym", False)  # without the field, the stored zero points decide
    layout = GptqLayer(bits, max(group_size, 0), act_order, version == "gptq", symmetric)
    return Gptq(layout, version.upper())

"""AWQ: `quant_method` awq, version gemm, as AutoAWQ and LLM-AWQ's successors write it.

weight[n, k] = (q[k, n] - z[k // group_size, n]) * scales[k // group_size, n]. `qweight` [K, N / 8] and `qzeros`
[groups, N / 8] pack eight neighbouring output channels into each word of 32 bits, in the order 0 2 4 6 1 3 5 7 from the
lowest bits.
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
    layout_of_qweight,
    matrix_shape,
    num_groups,
    refuse_unknown,
    required,
)
from quire.worker.models.files.quantized.weight import ScaledWeight
from quire.worker.models.files.quantized.words import unpack_columns

BITS, PER_WORD = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MEANT = ("bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "quant_method", "method",
         "checkpoint_format", "pack_dtype", "data_type")  # fmt: skip
NEUTRAL = ("modules_to_not_convert", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse",
           "meta", "sym", "desc_act", "lm_head")  # fmt: skip


@dataclass(frozen=True)
class AwqLayer:
    """A layer. group_size 0: one group of all input features."""

    group_size: int
    scale: str = "scales"
    stored_as: str = ""  # integers with zero points
    integer_bits: int = 0

    @property
    def label(self) -> str:
        return f"4 bits, groups of {self.group_size}" if self.group_size else "4 bits, one group per channel"

    def row_unit(self, k: int) -> int:
        return PER_WORD

    def shape(self, stored_shape: StoredShape, load: Load) -> tuple[int, int]:
        return matrix_shape(stored_shape, "scales")[1], matrix_shape(stored_shape, "qweight")[0]

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        groups = num_groups(k, self.group_size)
        words = -(-n // PER_WORD)
        return {
            "qweight": Stored(("I32",), ((k, words),)),
            "qzeros": Stored(("I32",), ((groups, words),)),
            "scales": Stored(FLOATS, ((groups, n),)),
        }

    def weight(self, n: int, k: int, load: Load) -> ScaledWeight:
        values = unpack_columns(required(load, "qweight"), BITS, n, ORDER).T.contiguous()
        zeros = unpack_columns(required(load, "qzeros"), BITS, n, ORDER).T.to(torch.int16)
        scales = required(load, "scales").T.contiguous()
        return ScaledWeight(values, scales, (1, self.group_size or k), zeros.contiguous(), bits=BITS)


@dataclass(frozen=True)
class Awq:
    """A checkpoint. The layers that have a `qweight` are quantised, and the rest is not."""

    layout: AwqLayer
    label: str = "AWQ"
    stored_as: str = ""
    rounds_activations: bool = False

    def layer(self, name: str, stored_type: StoredType) -> LayerLayout | None:
        return layout_of_qweight(self.layout, name, stored_type)


def read_awq(fields: Fields) -> Awq:
    """Parse the fields of a `quantization_config`. Raises CheckpointError."""
    refuse_unknown(fields, (*MEANT, *NEUTRAL, *AUTO_ROUND_FIELDS))
    if fields.get("data_type", "int") != "int":
        raise fields.fault("data_type", "int; use a checkpoint of integers, or one that is not quantised")
    bits = "bits" if fields.has("bits") else "w_bit"
    if fields.integer(bits, BITS) != BITS:
        raise fields.fault(bits, "4; use a checkpoint of 4 bits, or one that is not quantised")
    size = "group_size" if fields.has("group_size") else "q_group_size"
    group_size = fields.integer(size, 128, minimum=-1)
    if group_size == 0:
        raise fields.fault(size, "-1 or a number above 0")
    if not fields.flag("zero_point", True):
        raise fields.fault("zero_point", "true; quantise the model again with zero points")
    for name in ("version", "format", "checkpoint_format"):
        version = fields.get(name, "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise fields.fault(name, "gemm; quantise the model again with this version")
    if fields.get("pack_dtype", "int32") != "int32":
        raise fields.fault("pack_dtype", "int32; save the model again with it")
    if fields.flag("desc_act", False):
        raise fields.fault("desc_act", "false")
    return Awq(AwqLayer(max(group_size, 0)))

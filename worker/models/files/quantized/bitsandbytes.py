"""bitsandbytes: `quant_method` bitsandbytes, as Transformers saves it: NF4, FP4 and LLM.int8().

4 bits: `weight` [n * k / 2, 1] uint8 has two codes per byte, the first in the higher bits, row by row. A block of 64
codes has a scale in `weight.absmax`, float32: weight = quant_map[code] * absmax. With double quantisation absmax is
uint8: absmax = nested_quant_map[code] * nested_absmax + nested_offset, with a `nested_absmax` per 256 blocks.
`weight.quant_state.bitsandbytes__nf4` (or fp4) is a JSON text with the sizes.

8 bits: weight[n, k] = value[n, k] * SCB[n] / 127.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.weights import FP4, GROUP, NF4, TABLES, GroupedWeight
from quire.shared.model.fields import Fields
from quire.worker.models.files.quantized.layout import (
    LayerLayout,
    Load,
    Stored,
    StoredShape,
    StoredType,
    TensorFault,
    matrix_shape,
    refuse_unknown,
    required,
)
from quire.worker.models.files.quantized.weight import ScaledWeight, StoredCodes, StoredWeight

BLOCK, NESTED_BLOCK = 64, 256  # weights with a scale, and scales with one
STATE, TEXT_BYTES = "weight.quant_state.bitsandbytes__", 4096
MEANT = ("quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type",
         "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant", "llm_int8_has_fp16_weight")  # fmt: skip
# The type of products, the rounding of activations, and lists of layers, which the tensors show.
NEUTRAL = ("bnb_4bit_compute_dtype", "llm_int8_enable_fp32_cpu_offload", "llm_int8_skip_modules", "llm_int8_threshold",
           "modules_to_not_convert")  # fmt: skip
AGAIN = "quantise the model again"


@dataclass(frozen=True)
class FourBitLayer:
    """A layer of 4 bits. kind: NF4 or FP4. is_nested: with double quantisation."""

    kind: str
    is_nested: bool
    scale: str = "weight.absmax"
    stored_as: str = ""
    integer_bits: int = 0

    @property
    def label(self) -> str:
        return f"{self.kind.upper()} in blocks of {BLOCK}" + (", double quantisation" if self.is_nested else "")

    def row_unit(self, k: int) -> int:
        block = BLOCK * NESTED_BLOCK if self.is_nested else BLOCK
        return block // math.gcd(block, k)

    def shape(self, stored_shape: StoredShape, load: Load) -> tuple[int, int]:
        text = load(STATE + self.kind)
        if text is None:
            raise TensorFault(STATE + self.kind, "is missing", AGAIN)
        n, k = self._state(text)["shape"]
        return n, k

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        blocks = -(-n * k // BLOCK)
        stored = {
            "weight": Stored(("U8",), ((-(-n * k // 2), 1),)),
            "weight.absmax": Stored(("U8" if self.is_nested else "F32",), ((blocks,),)),
            "weight.quant_map": Stored(("F32",), ((16,),)),
            STATE + self.kind: Stored(("U8",), ((),), most=TEXT_BYTES),
        }
        if self.is_nested:
            stored["weight.nested_absmax"] = Stored(("F32",), ((-(-blocks // NESTED_BLOCK),),))
            stored["weight.nested_quant_map"] = Stored(("F32",), ((256,),))
        return stored

    def weight(self, n: int, k: int, load: Load) -> StoredWeight:
        state = self._state(required(load, STATE + self.kind))
        if state["shape"][1] != k:
            raise self._fault(f"has the shape {state['shape']}, expected {k} input features", "repair config.json")
        packed, scales = required(load, "weight").flatten(), self._scales(load, state)
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[: n * k].view(n, k)
        table = required(load, "weight.quant_map")
        if k % GROUP or not torch.equal(table, torch.tensor(TABLES[self.kind])):  # blocks may cross the ends of rows
            values = table[codes.int()] * scales.repeat_interleave(BLOCK)[: n * k].view(n, k)
            return ScaledWeight(values, torch.ones(1, 1), (n, k))
        of_groups = scales.repeat_interleave(BLOCK // GROUP)[: n * k // GROUP].view(n, k // GROUP)
        return StoredCodes(GroupedWeight(codes, of_groups, self.kind))

    def _scales(self, load: Load, state: dict[str, Any]) -> Tensor:
        """Return the scale of each block."""
        stored = required(load, "weight.absmax")
        if not self.is_nested:
            return stored
        nested = required(load, "weight.nested_absmax").repeat_interleave(NESTED_BLOCK)[: len(stored)]
        offset: float = state["nested_offset"]
        scales = required(load, "weight.nested_quant_map")[stored.int()] * nested + offset
        if not bool(scales.isfinite().all()):
            raise TensorFault("weight.nested_absmax", "makes scales that are not finite", AGAIN)
        return scales

    def _state(self, text: Tensor) -> dict[str, Any]:
        """Return the fields of a text, of which each is what this format has. Raises TensorFault."""
        try:
            state: Any = json.loads(bytes(text.tolist()))
        except (ValueError, RecursionError) as error:
            raise self._fault(f"is not valid JSON ({error})", AGAIN) from None
        fields: dict[str, Any] = state if isinstance(state, dict) else {}
        wanted: dict[str, Any] = {"quant_type": self.kind, "blocksize": BLOCK}
        if self.is_nested:
            wanted |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        for name, value in wanted.items():
            if fields.get(name) != value:
                raise self._fault(f"has the {name} {fields.get(name)!r:.40}, expected {value!r}", AGAIN)
        sizes, offset = fields.get("shape"), fields.get("nested_offset")
        sizes = sizes if isinstance(sizes, list) else [sizes]
        if len(sizes) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
            raise self._fault(f"has the shape {sizes!r:.40}, expected two numbers", AGAIN)
        if self.is_nested and (type(offset) is not float or not math.isfinite(offset)):
            raise self._fault(f"has the nested_offset {offset!r:.40}, expected a number", AGAIN)
        return fields

    def _fault(self, what: str, remedy: str) -> TensorFault:
        return TensorFault(STATE + self.kind, what, remedy)


@dataclass(frozen=True)
class EightBitLayer:
    """A layer of LLM.int8(). Activations are not rounded, so that no outliers are lost."""

    label: str = "8 bits, per channel"
    scale: str = "SCB"
    stored_as: str = "int8"
    integer_bits: int = 0

    def row_unit(self, k: int) -> int:
        return 1

    def shape(self, stored_shape: StoredShape, load: Load) -> tuple[int, int]:
        return matrix_shape(stored_shape, "weight")

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        return {
            "weight": Stored(("I8",), ((n, k),)),
            "SCB": Stored(("F32",), ((n,),)),
            # Rows as they are; old versions had other orders, of GPUs.
            "weight_format": Stored(("U8",), ((), (1,)), optional=True, holds=(0,)),
        }

    def weight(self, n: int, k: int, load: Load) -> ScaledWeight:
        return ScaledWeight(required(load, "weight"), required(load, "SCB")[:, None] / 127, (1, k))


@dataclass(frozen=True)
class BitsAndBytes:
    """A checkpoint. The layers whose weights are bytes are quantised, and the rest is not."""

    label: str
    kind: str  # of 4 bits, if a layer does not say it
    stored_as: str = ""
    rounds_activations: bool = False

    def layer(self, name: str, stored_type: StoredType) -> LayerLayout | None:
        stored = stored_type(f"{name}.weight")
        if stored == "I8":
            return EightBitLayer()
        if stored != "U8":
            return None
        kinds = [kind for kind in (NF4, FP4) if stored_type(f"{name}.{STATE}{kind}") is not None]
        is_nested = stored_type(f"{name}.weight.nested_absmax") is not None
        return FourBitLayer(kinds[0] if kinds else self.kind, is_nested)


def read_bitsandbytes(fields: Fields) -> BitsAndBytes:
    """Parse the fields of a `quantization_config`. Raises CheckpointError."""
    refuse_unknown(fields, (*MEANT, *NEUTRAL))
    in_4, in_8 = (fields.flag(f"load_in_{bits}bit", fields.flag(f"_load_in_{bits}bit", False)) for bits in (4, 8))
    if in_4 == in_8:
        raise fields.fault("load_in_4bit", "either load_in_4bit or load_in_8bit")
    if in_8:
        if fields.flag("llm_int8_has_fp16_weight", False):
            raise fields.fault("llm_int8_has_fp16_weight", "false; save the model again without it")
        return BitsAndBytes("bitsandbytes LLM.int8()", NF4, stored_as="int8")
    kind = fields.get("bnb_4bit_quant_type", FP4)
    if kind not in (NF4, FP4):
        raise fields.fault("bnb_4bit_quant_type", f"{NF4} or {FP4}")
    if fields.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        raise fields.fault("bnb_4bit_quant_storage", "uint8; save the model again with it")
    return BitsAndBytes(f"bitsandbytes {kind.upper()}", kind)

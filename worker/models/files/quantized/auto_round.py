"""AutoRound of Intel: `quant_method` auto-round or intel/auto-round, whose tensors have the layout of another format.

`packing_format` names it: auto_round:auto_gptq is version 1 of GPTQ, auto_round and auto_round:gptqmodel are version 2,
whose zero points are stored as they are, auto_round:auto_awq is AWQ, auto_round:llm_compressor is NVFP4 or MXFP4 of
compressed-tensors, and auto_round:fp8_static is FP8. `extra_config` has other bits for some layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.shared.model.fields import Fields
from quire.worker.models.files.layer_names import EXPRESSION, LayerNames, PatternError
from quire.worker.models.files.quantized.awq import BITS as AWQ_BITS
from quire.worker.models.files.quantized.awq import AwqLayer
from quire.worker.models.files.quantized.gptq import GptqLayer
from quire.worker.models.files.quantized.layout import (
    AUTO_ROUND_FIELDS,
    E4M3,
    Fp8Layer,
    LayerLayout,
    StoredType,
    layout_of_qweight,
    refuse_unknown,
)
from quire.worker.models.files.quantized.mxfp4 import Mxfp4Layer
from quire.worker.models.files.quantized.nvfp4 import compressed_nvfp4
from quire.worker.models.files.tensor_names import layer_spellings

MEANT = ("quant_method", "bits", "group_size", "sym", "data_type", "packing_format", "extra_config")
# Fields of a layer in `extra_config`. Activations are not rounded.
OF_LAYER = ("bits", "group_size", "sym", "data_type", "act_bits", "act_group_size", "act_sym", "act_data_type",
            "act_dynamic", "scale_dtype")  # fmt: skip
WHOLE = 16  # bits of a layer that is not quantised
OTHER = "use a checkpoint of another format, or the one that this one was made from"


def _gptq_1(fields: Fields) -> LayerLayout:
    return _gptq(fields, is_v1=True)


def _gptq_2(fields: Fields) -> LayerLayout:
    return _gptq(fields, is_v1=False)


def _gptq(fields: Fields, is_v1: bool) -> LayerLayout:
    bits, size = _integers(fields)
    if bits not in (4, 8):
        raise fields.fault("bits", f"4 or 8; {OTHER}")
    return GptqLayer(bits, size, act_order=False, is_v1=is_v1, symmetric=fields.flag("sym", True))


def _awq(fields: Fields) -> LayerLayout:
    bits, size = _integers(fields)
    if bits != AWQ_BITS:
        raise fields.fault("bits", f"{AWQ_BITS} in this packing_format; {OTHER}")
    return AwqLayer(size)


def _integers(fields: Fields) -> tuple[int, int]:
    """Return bits and group size of integers; 0: one group of all input features."""
    if fields.get("data_type", "int") != "int":
        raise fields.fault("data_type", f"int in this packing_format; {OTHER}")
    size = fields.integer("group_size", 128, minimum=-1)
    if size == 0:
        raise fields.fault("group_size", "-1 or a number above 0")
    return fields.integer("bits", 4), max(size, 0)


def _floats(fields: Fields) -> LayerLayout:
    if fields.integer("bits") != 4:
        raise fields.fault("bits", f"4 in this packing_format; {OTHER}")
    kind, size = str(fields.get("data_type")), fields.integer("group_size", minimum=-1)
    if kind.startswith("nv_fp") and size == 16:
        return compressed_nvfp4()
    if kind.startswith("mx_fp") and size == 32:
        return Mxfp4Layer()
    raise fields.fault("data_type", f"nv_fp with group_size 16, or mx_fp with 32; {OTHER}")


def _fp8(fields: Fields) -> LayerLayout:
    return Fp8Layer("weight_scale")


LAYOUTS: dict[str, Callable[[Fields], LayerLayout]] = {
    "auto": _gptq_1,
    "auto_round": _gptq_2,
    "auto_round:auto_awq": _awq,
    "auto_round:auto_gptq": _gptq_1,
    "auto_round:awq": _awq,
    "auto_round:fp8_static": _fp8,
    "auto_round:gptq": _gptq_1,
    "auto_round:gptqmodel": _gptq_2,
    "auto_round:llm_compressor": _floats,
}


@dataclass(frozen=True)
class AutoRound:
    """A checkpoint. The tensors show which layers are quantised.

    exceptions: layers of other bits; the first that matches counts.
    """

    label: str
    layout: LayerLayout
    exceptions: tuple[tuple[LayerNames, LayerLayout], ...]
    rounds_activations: bool = False

    @property
    def stored_as(self) -> str:
        kinds = {layout.stored_as for layout in (self.layout, *(layout for _, layout in self.exceptions))}
        return kinds.pop() if len(kinds) == 1 else ""

    def layer(self, name: str, stored_type: StoredType) -> LayerLayout | None:
        layout = self._of(name)
        if isinstance(layout, Fp8Layer):
            return layout if stored_type(f"{name}.weight") == E4M3 else None
        if isinstance(layout, GptqLayer | AwqLayer):
            return layout_of_qweight(layout, name, stored_type)
        return layout if stored_type(f"{name}.weight_packed") is not None else None

    def _of(self, name: str) -> LayerLayout:
        spellings = layer_spellings(name)
        for names, layout in self.exceptions:
            if any(map(names.match, spellings)):
                return layout
        return self.layout


def read_auto_round(fields: Fields) -> AutoRound:
    """Parse the fields of a `quantization_config`. Raises CheckpointError."""
    refuse_unknown(fields, (*MEANT, *AUTO_ROUND_FIELDS))
    packing = fields.get("packing_format", "auto_round:auto_gptq" if fields.flag("sym", False) else None)
    if not isinstance(packing, str) or packing not in LAYOUTS:
        raise fields.fault("packing_format", f"{', '.join(LAYOUTS)}; {OTHER}")
    read = LAYOUTS[packing]
    extra = fields.section("extra_config")
    # A name is closer than an expression.
    names = sorted(extra.names(), key=_is_expression)
    found = ((name, _exception(fields, extra.section(name), read)) for name in names)
    exceptions = tuple((_pattern(extra, name), layout) for name, layout in found if layout is not None)
    return AutoRound(f"AutoRound {packing}", read(fields), exceptions)


def _exception(whole: Fields, layer: Fields, read: Callable[[Fields], LayerLayout]) -> LayerLayout | None:
    """Return the layout of a layer of `extra_config`; None if its tensors show that it is not quantised."""
    refuse_unknown(layer, OF_LAYER)
    if layer.integer("bits", whole.integer("bits", 4)) >= WHOLE:
        return None
    values = {name: layer.get(name, whole.get(name)) for name in ("bits", "group_size", "sym", "data_type")}
    return read(Fields(values, layer.where))


def _is_expression(name: str) -> bool:
    return any(token in name for token in ("*", "^", "$", "|", "(", "[", "?", "+", "\\"))


def _pattern(extra: Fields, name: str) -> LayerNames:
    try:
        # AutoRound searches anywhere in a name.
        return LayerNames([f"{EXPRESSION}.*(?:{name})" if _is_expression(name) else name])
    except PatternError as error:
        raise extra.fault(name, f"patterns that can be matched fast, but it {error}") from None

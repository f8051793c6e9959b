"""FP8: `quant_method` fp8 (blocks or one scale per tensor) and fbgemm_fp8 (one scale per output channel).

Weights are float8_e4m3fn. weight[n, k] = value[n, k] * scale of its block. The scale is `weight_scale_inv` (blocks; the
name is historical: it is multiplied) or `weight_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.weights import FP8
from quire.shared.model.fields import Fields
from quire.worker.models.files.quantized.layout import E4M3, Fp8Layer, LayerLayout, StoredType, refuse_unknown

MEANT = ("quant_method", "weight_block_size", "activation_scheme", "fmt", "dequantize", "expert_dtype")
# Types of scales and layers, which the tensors show; activations are not rounded, so their bound has no effect.
NEUTRAL = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "scale_fmt", "activation_scale_ub",
           "kv_cache_scheme")  # fmt: skip


@dataclass(frozen=True)
class Fp8:
    """A checkpoint. The layers whose weights are FP8 are quantised, and the rest is not."""

    label: str
    block: tuple[int, ...]
    stored_as: str = FP8
    rounds_activations: bool = False

    def layer(self, name: str, stored_type: StoredType) -> LayerLayout | None:
        if stored_type(f"{name}.weight") != E4M3:
            return None
        # Without blocks, the scale has either name.
        inverse = self.block or stored_type(f"{name}.weight_scale") is None
        return Fp8Layer("weight_scale_inv" if inverse else "weight_scale", self.block)


def read_fp8(fields: Fields) -> Fp8:
    """Parse the fields of a `quantization_config`. Raises CheckpointError."""
    refuse_unknown(fields, (*MEANT, *NEUTRAL))
    if fields.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.fault("fmt", "e4m3; use a checkpoint of this type, or one that is not quantised")
    if fields.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
        raise fields.fault("activation_scheme", "dynamic or static")
    if fields.get("expert_dtype", "fp8") != "fp8":
        raise fields.fault("expert_dtype", "fp8")
    block = fields.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(_is_size(at) for at in block)):
        raise fields.fault("weight_block_size", "two numbers above 0, such as [128, 128]")
    return Fp8(str(fields.get("quant_method")).upper().replace("_", " "), tuple(block or ()))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31

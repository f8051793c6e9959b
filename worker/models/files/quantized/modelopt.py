"""Model Optimizer of NVIDIA: `quant_method` modelopt, or a file hf_quant_config.json: FP8 and NVFP4.

FP8: weight[n, k] = value[n, k] * weight_scale, with one scale for the tensor or one per output channel. `nvfp4` has the
layout of NVFP4. The tensors show which layers are quantised, so `exclude_modules` and `ignore` have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.weights import FP8
from quire.shared.model.fields import Fields
from quire.worker.models.files.quantized.layout import (
    E4M3,
    Fp8Layer,
    LayerLayout,
    StoredType,
    refuse_unknown,
)
from quire.worker.models.files.quantized.nvfp4 import modelopt_nvfp4

MIXED = "MIXED_PRECISION"
FP8_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
ALGORITHMS = (*FP8_ALGORITHMS, *NVFP4_ALGORITHMS)
MEANT = ("quant_algo", "quant_method", "group_size", "quantized_layers", "config_groups", "has_zero_point")
# The layers, the type of the KV cache, and the writer.
NEUTRAL = ("exclude_modules", "ignore", "kv_cache_quant_algo", "kv_cache_scheme", "producer", "version")
OTHER = "use a checkpoint of another format, or the one that this one was made from"


@dataclass(frozen=True)
class ModelOpt:
    """A checkpoint. fields: of its configuration, for errors."""

    label: str
    fields: Fields
    stored_as: str = ""
    rounds_activations: bool = False

    def layer(self, name: str, stored_type: StoredType) -> LayerLayout | None:
        if stored_type(f"{name}.pre_quant_scale") is not None:
            raise self.fields.fault("quant_algo", f"no {name}.pre_quant_scale, which scales activations; {OTHER}")
        kind = stored_type(f"{name}.weight")
        if kind == E4M3:
            return Fp8Layer("weight_scale")
        return modelopt_nvfp4() if kind == "U8" else None


def read_modelopt(fields: Fields) -> ModelOpt:
    """Parse the fields of a `quantization_config`, or of `quantization` in hf_quant_config.json.

    Raises CheckpointError.
    """
    refuse_unknown(fields, (*MEANT, *NEUTRAL))
    algorithm = fields.get("quant_algo")
    layers = fields.section("quantized_layers")
    algorithms = [_algorithm(layers.section(name), ALGORITHMS) for name in layers.names()]
    if algorithm != MIXED:
        algorithms.append(_algorithm(fields, (*ALGORITHMS, MIXED)))
    elif not algorithms:
        raise fields.fault("quantized_layers", f"an object with the layers of {MIXED}")
    label = f"modelopt {algorithm}"
    return ModelOpt(label, fields, stored_as=FP8 if set(algorithms) <= set(FP8_ALGORITHMS) else "")


def _algorithm(fields: Fields, supported: tuple[str, ...]) -> str:
    """Return the algorithm of all layers or of one, whose values are honoured."""
    algorithm = fields.get("quant_algo")
    if algorithm not in supported:
        raise fields.fault("quant_algo", f"{', '.join(supported)}; {OTHER}")
    if algorithm in NVFP4_ALGORITHMS and fields.integer("group_size", 16) != 16:
        raise fields.fault("group_size", f"16 for NVFP4; {OTHER}")
    if fields.flag("has_zero_point", False):
        raise fields.fault("has_zero_point", f"false; {OTHER}")
    return str(algorithm)

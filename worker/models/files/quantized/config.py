"""Reads `quantization_config` (or `compression_config`) of `config.json`, and names the formats that are not read.

Old checkpoints of Model Optimizer have theirs in hf_quant_config.json alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.shared.model.fields import Fields, read_json
from quire.worker.models.files.quantized.auto_round import read_auto_round
from quire.worker.models.files.quantized.awq import read_awq
from quire.worker.models.files.quantized.bitsandbytes import read_bitsandbytes
from quire.worker.models.files.quantized.compressed_tensors import read_compressed_tensors
from quire.worker.models.files.quantized.fp8 import read_fp8
from quire.worker.models.files.quantized.gptq import read_gptq
from quire.worker.models.files.quantized.layout import Quantization, refuse_unknown
from quire.worker.models.files.quantized.modelopt import read_modelopt
from quire.worker.models.files.quantized.mxfp4 import read_mxfp4

# Fields that say how the weights of a checkpoint are quantised.
QUANTIZED = ("quantization_config", "compression_config")
OF_MODELOPT = "hf_quant_config.json"
READERS: dict[str, Callable[[Fields], Quantization]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "intel/auto-round": read_auto_round,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}


def parse_quantization(fields: Fields, folder: Path | None = None) -> Quantization | None:
    """Parse the quantisation of a checkpoint; None if it is not quantised. Raises CheckpointError.

    fields: of `config.json`. folder: of the checkpoint, where there may be a hf_quant_config.json.
    """
    sections = [name for name in QUANTIZED if fields.get(name) is not None]
    if not sections:
        return None if folder is None else _of_modelopt(folder / OF_MODELOPT)
    section = fields.section(sections[0])
    # Configurations of compressed-tensors before its field quant_method have only groups.
    default = "compressed-tensors" if section.has("config_groups") else None
    if section.has("load_in_4bit") or section.has("load_in_8bit"):  # so did those of bitsandbytes
        default = "bitsandbytes"
    method = section.get("quant_method", default)
    if not isinstance(method, str) or method not in READERS:
        remedy = "use a checkpoint in one of these formats, or the one that this one was made from"
        raise section.fault("quant_method", f"{', '.join(READERS)}; {remedy}")
    return READERS[method](section)


def _of_modelopt(path: Path) -> Quantization | None:
    """Parse a hf_quant_config.json; None if there is none, or it leaves the weights as they are."""
    if not path.exists():
        return None
    fields = Fields(read_json(path, "copy the checkpoint again"), str(path))
    refuse_unknown(fields, ("producer", "quantization"))
    section = fields.section("quantization")
    return None if section.get("quant_algo") is None else read_modelopt(section)

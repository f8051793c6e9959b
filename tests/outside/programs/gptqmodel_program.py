"""Quantises a checkpoint with GPTQModel by several configurations, and computes the logits of each result.

    python gptqmodel_program.py SOURCE OUT PROMPTS

SOURCE: a checkpoint of Hugging Face. Writes the folders OUT/<case> with the checkpoint, as `save` of the package writes
it, and the file logits.safetensors: of the weights that the package's own layers dequantise, for each prompt of the
JSON list PROMPTS. Prints the names of the cases.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # with its default, the package does not start on two cores
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT, METHOD
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

SAMPLES, LENGTH = 16, 32
AWQ = {"quant_method": METHOD.AWQ, "format": FORMAT.GEMM}
CASES: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "gptq_order": {"bits": 4, "group_size": 64, "sym": True, "desc_act": True, "act_group_aware": False},
    "gptq_asym": {"bits": 4, "group_size": 64, "sym": False, "desc_act": False},
    "gptq_v2_asym": {"bits": 4, "group_size": 64, "sym": False, "desc_act": False, "format": FORMAT.GPTQ_V2},
    "gptq_8": {"bits": 8, "group_size": -1, "sym": True, "desc_act": False, "act_group_aware": False},
    "awq": {"bits": 4, "group_size": 128, "sym": False, **AWQ},
}


def dequantised(layer: Any, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight [N, K] of a layer, by the package's own function and in float32."""
    if hasattr(layer, "dequantize_weight"):
        layer.scales = scales
        return layer.dequantize_weight().T
    return dequantize_gemm(layer.qweight, layer.qzeros, scales, layer.bits, layer.group_size).T


def main() -> None:
    source, out, prompts = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, plain.config.vocab_size, (SAMPLES, LENGTH), generator=generator)
    samples = [{"input_ids": text, "attention_mask": torch.ones_like(text)} for text in ids]
    for name, fields in CASES.items():
        dtype = torch.float16 if name == "awq" else torch.float32  # its AWQ packs 16 bits only
        model = GPTQModel.load(str(source), QuantizeConfig(**fields), device="cpu", dtype=dtype)
        model.quantize(samples, batch_size=1)
        model.save(str(out / name))
        loaded = GPTQModel.load(str(out / name), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model
        # The package rounds to 16 bits what it loads, so what it keeps as floats comes from the file.
        weights = load_file(out / name / "model.safetensors")
        layers = {key: layer for key, layer in loaded.named_modules() if hasattr(layer, "qweight")}
        for key, layer in layers.items():
            weights[f"{key}.weight"] = dequantised(layer, weights[f"{key}.scales"].float())
        with torch.inference_mode():
            plain.load_state_dict({key: weights[key].float() for key in plain.state_dict()})
            logits = {str(at): plain(torch.tensor([ids])).logits[0] for at, ids in enumerate(prompts)}
        save_file(logits, out / name / "logits.safetensors")
        print(json.dumps({"case": name, "result": len(layers)}), flush=True)


if __name__ == "__main__":
    main()

"""Quantises a checkpoint with NVIDIA's Model Optimizer, and computes the logits of each result.

    python modelopt_program.py SOURCE OUT PROMPTS

SOURCE: a checkpoint of Hugging Face. Writes the folders OUT/<case> with the checkpoint, as export_hf_checkpoint writes
it, and the file logits.safetensors: of the weights that the package dequantises, for each prompt of the JSON list
PROMPTS. Prints the names of the cases.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

SAMPLES, LENGTH = 8, 32


def without(config: dict[str, Any], *patterns: str) -> dict[str, Any]:
    """Return a configuration that leaves the layers of these patterns as they are."""
    changed = copy.deepcopy(config)
    rules = changed["quant_cfg"]
    for pattern in patterns:
        if isinstance(rules, list):
            rules.append({"quantizer_name": pattern, "enable": False})
        else:
            rules[pattern] = {"enable": False}
    return changed


CASES: dict[str, dict[str, Any]] = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "nvfp4_mixed": without(mtq.NVFP4_DEFAULT_CFG, "*layers.0.self_attn*", "*down_proj*"),
}


def dequantised(tensors: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """Return the weights of a layer in float32."""
    weight, scale = tensors[f"{layer}.weight"], tensors.get(f"{layer}.weight_scale")
    if scale is None:
        return weight.float()
    if weight.dtype is torch.float8_e4m3fn:
        return FP8QTensor(weight.shape, torch.float32, weight).dequantize(torch.float32, scale=scale)
    shape, double = torch.Size((weight.shape[0], 2 * weight.shape[1])), tensors[f"{layer}.weight_scale_2"]
    stored = NVFP4QTensor(shape, torch.float32, weight)
    return stored.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})


def main() -> None:
    source, out, prompts = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    for name, config in CASES.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(0)
        texts = torch.randint(0, model.config.vocab_size, (SAMPLES, LENGTH), generator=generator)
        mtq.quantize(model, config, lambda calibrated, texts=texts: [calibrated(text[None]) for text in texts])
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=out / name)
        tensors = load_file(out / name / "model.safetensors")
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).float()
        for layer, module in plain.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = dequantised(tensors, layer)
        with torch.inference_mode():
            logits = {str(at): plain(torch.tensor([ids])).logits[0] for at, ids in enumerate(prompts)}
        save_file(logits, out / name / "logits.safetensors")
        print(json.dumps({"case": name, "result": sorted(tensors)}), flush=True)


if __name__ == "__main__":
    main()

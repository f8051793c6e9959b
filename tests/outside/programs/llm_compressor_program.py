"""Quantises a checkpoint with LLM Compressor by several schemes, and computes the logits of each result.

    python llm_compressor.py SOURCE OUT PROMPTS

SOURCE: a checkpoint of Hugging Face. Writes the folders OUT/<case> with the checkpoint, as save_pretrained of the
package writes it, and the file logits.safetensors: of the weights that compressed-tensors decompresses, for each prompt
of the JSON list PROMPTS. Prints the names of the cases.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

SAMPLES, LENGTH = 16, 32
CALIBRATED = ("gptq", "gptq_static", "nvfp4")


def group(**weights: Any) -> dict[str, Any]:
    """Return a scheme for all linear layers whose activations are not rounded."""
    return {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}}


CASES: dict[str, Any] = {
    "w4a16": lambda: QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    "w4a16_asym": lambda: QuantizationModifier(targets="Linear", scheme="W4A16_ASYM", ignore=["lm_head"]),
    "w8a16": lambda: QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"]),
    "w8a16_groups": lambda: QuantizationModifier(
        config_groups=group(num_bits=8, strategy="group", group_size=64), ignore=["lm_head"]
    ),
    "w8a8": lambda: QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
    "fp8_dynamic": lambda: QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"]),
    "fp8_block": lambda: QuantizationModifier(targets="Linear", scheme="FP8_BLOCK", ignore=["lm_head"]),
    "nvfp4": lambda: QuantizationModifier(targets="Linear", scheme="NVFP4", ignore=["lm_head"]),
    "nvfp4a16": lambda: QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"]),
    "mxfp4a16": lambda: QuantizationModifier(targets="Linear", scheme="MXFP4A16", ignore=["lm_head"]),
    "gptq": lambda: GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"], actorder=None),
    "gptq_static": lambda: GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"], actorder="static"),
}


def calibration(model: Any) -> dict[str, Any]:
    """Return the arguments of `oneshot` for texts of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (SAMPLES, LENGTH), generator=generator)
    samples = [{"input_ids": text, "attention_mask": torch.ones_like(text)} for text in ids]
    loader = DataLoader(samples, batch_size=1)
    return {"dataset": loader, "num_calibration_samples": SAMPLES, "max_seq_length": LENGTH}


def wide_nvfp4(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of NVFP4 layers as the package decompresses them, but in float32: it takes bfloat16."""
    tensors, weights = load_file(path), {}
    arguments = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    for name in (name for name in tensors if name.endswith(".weight_packed")):
        layer, packed = name.removesuffix(".weight_packed"), tensors[name]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
        scale, whole = tensors[f"{layer}.weight_scale"].float(), tensors[f"{layer}.weight_global_scale"]
        weights[f"{layer}.weight"] = dequantize(codes, scale, args=arguments, global_scale=whole, dtype=torch.float32)
    return weights


def main() -> None:
    source, out, prompts = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    for name, recipe in CASES.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        oneshot(model=model, recipe=recipe(), **(calibration(model) if name in CALIBRATED else {}))
        model.save_pretrained(out / name, save_compressed=True)
        decompressed = AutoModelForCausalLM.from_pretrained(
            out / name, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
        ).state_dict()
        if name.startswith("nvfp4"):
            decompressed |= wide_nvfp4(out / name / "model.safetensors")
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)  # which rounds no activations
        plain.load_state_dict({key: decompressed[key].float() for key in plain.state_dict()})
        with torch.inference_mode():
            logits = {str(at): plain(torch.tensor([ids])).logits[0] for at, ids in enumerate(prompts)}
        save_file(logits, out / name / "logits.safetensors")
        print(json.dumps({"case": name, "result": sorted(path.name for path in (out / name).iterdir())}), flush=True)


if __name__ == "__main__":
    main()

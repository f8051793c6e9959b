"""Quantises a checkpoint with AutoAWQ, and computes the logits of the result.

    python autoawq_program.py SOURCE OUT PROMPTS

SOURCE: a checkpoint of Hugging Face. Writes the folder OUT/gemm with the checkpoint, as `save_quantized` of the package
writes it, and the file logits.safetensors: of the weights that the package's own function dequantises, for each prompt
of the JSON list PROMPTS. Prints the name of the case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

SAMPLES, LENGTH = 16, 32
BITS, GROUP_SIZE = 4, 128
CONFIG = {"zero_point": True, "q_group_size": GROUP_SIZE, "w_bit": BITS, "version": "GEMM"}


def main() -> None:
    source, out, prompts = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    plain = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, plain.config.vocab_size, (SAMPLES, LENGTH), generator=generator).tolist()
    model = AutoAWQForCausalLM.from_pretrained(str(source), torch_dtype=torch.float32, device_map="cpu")
    model.quantize(None, quant_config=CONFIG, calib_data=texts, max_calib_seq_len=LENGTH)
    model.save_quantized(str(out / "gemm"))
    weights = {key: value.float() for key, value in model.model.state_dict().items()}
    layers = {key: layer for key, layer in model.model.named_modules() if hasattr(layer, "qweight")}
    for key, layer in layers.items():
        weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), BITS, GROUP_SIZE)
        weights[f"{key}.weight"] = weight.T
    with torch.inference_mode():
        plain.load_state_dict({key: weights[key] for key in plain.state_dict()})
        logits = {str(at): plain(torch.tensor([ids])).logits[0] for at, ids in enumerate(prompts)}
    save_file(logits, out / "gemm" / "logits.safetensors")
    print(json.dumps({"case": "gemm", "result": len(layers)}), flush=True)


if __name__ == "__main__":
    main()

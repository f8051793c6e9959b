"""Quantises a checkpoint with bitsandbytes, and computes the logits of each result.

    python bitsandbytes_program.py SOURCE OUT PROMPTS

SOURCE: a checkpoint of Hugging Face. Writes the folders OUT/<case> with the checkpoint, as save_pretrained writes it,
and the file logits.safetensors: of the weights that bitsandbytes dequantises in float32, for each prompt of the JSON
list PROMPTS. Prints the names of the cases.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

CASES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4_double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4_double": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "nf4_mixed": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": ["lm_head", "model.layers.0.self_attn", "model.layers.1.mlp.down_proj"],
    },
    "int8": {"load_in_8bit": True},
}


def dequantised(module: Any) -> torch.Tensor:
    """Return the weights of a layer in float32."""
    if isinstance(module, bnb.nn.Linear4bit):
        module.weight.quant_state.dtype = torch.float32
        return bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    if isinstance(module, bnb.nn.Linear8bitLt):
        # The package rounds the products to float16; the definition is values * scales / 127.
        scales = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
        return module.weight.data.float() * scales.float()[:, None] / 127
    return module.weight.data.float()


def main() -> None:
    source, out, prompts = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    for name, fields in CASES.items():
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**fields), device_map="cpu"
        )
        model.save_pretrained(out / name)
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).float()
        modules = dict(model.named_modules())
        quantised = 0
        for layer, module in plain.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = dequantised(modules[layer])
                quantised += type(modules[layer]) is not torch.nn.Linear
        with torch.inference_mode():
            logits = {str(at): plain(torch.tensor([ids])).logits[0] for at, ids in enumerate(prompts)}
        save_file(logits, out / name / "logits.safetensors")
        print(json.dumps({"case": name, "result": quantised}), flush=True)


if __name__ == "__main__":
    main()

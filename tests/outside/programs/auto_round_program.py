"""Quantises a checkpoint with AutoRound in several formats, and computes the logits of each result.

    python auto_round_program.py SOURCE OUT PROMPTS

SOURCE: a checkpoint of Hugging Face with a tokenizer. Writes the folders OUT/<case> with the checkpoint, and the file
logits.safetensors: of the rounded weights that the package packs, for each prompt of the JSON list PROMPTS. Prints the
names of the cases.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

WHOLE = 16  # bits of a layer that is not quantised, whose weights are written as they were
OTHER_BITS = {"mlp.down_proj": {"bits": 8}, "layers.0.self_attn": {"bits": 16}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "auto_round": ("auto_round", {"group_size": 32}),
    "auto_round_gptq": ("auto_round:auto_gptq", {"group_size": 128, "sym": False}),
    "auto_round_awq": ("auto_round:auto_awq", {"group_size": 64, "sym": False}),
    "auto_round_mixed": ("auto_round", {"group_size": 32, "layer_config": OTHER_BITS}),
    "gptq": ("auto_gptq", {"group_size": 128}),
    "gptq_asym": ("auto_gptq", {"group_size": 128, "sym": False}),
    "awq": ("auto_awq", {"group_size": 64, "sym": False}),
    "mxfp4": ("auto_round", {"scheme": "MXFP4"}),
}


def multiplied(layer: Any) -> torch.Tensor:
    """Return the weights of a layer that AutoRound has rounded, in float32: the package has them in bfloat16."""
    weight = layer.weight.data.float()
    if getattr(layer, "data_type", "") != "int":  # those of MXFP4 are bfloat16 numbers
        return weight
    scales, size = layer.scale.half().float().view(len(weight), -1), layer.group_size
    zeros = layer.zp.float().view(len(weight), -1) if isinstance(layer.zp, torch.Tensor) else float(layer.zp)
    scales = scales.repeat_interleave(size, dim=1)
    zeros = zeros.repeat_interleave(size, dim=1) if isinstance(zeros, torch.Tensor) else zeros
    return ((weight / scales + zeros).round() - zeros) * scales


def is_quantised(name: str, layer: Any) -> bool:
    """Return whether a layer is written as codes. Layers whose activations are rounded do not say their bits."""
    return name != "lm_head" and getattr(layer, "bits", 0) < WHOLE


def main() -> None:
    source, out, prompts = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(source)
    for name, (form, fields) in CASES.items():
        scheme = {"scheme": "W4A16"} | fields

        def rounder(scheme: dict[str, Any] = scheme) -> AutoRound:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            return AutoRound(model, tokenizer, iters=0, disable_opt_rtn=True, device_map="cpu", **scheme)

        rounded, _ = rounder().quantize()
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        layers = dict(rounded.named_modules())
        for layer, module in plain.named_modules():
            if isinstance(module, torch.nn.Linear) and is_quantised(layer, layers[layer]):
                module.weight.data = multiplied(layers[layer])
        rounder().quantize_and_save(str(out / "written"), format=form)
        (written,) = (out / "written").iterdir()
        written.rename(out / name)
        with torch.inference_mode():
            logits = {str(at): plain(torch.tensor([ids])).logits[0] for at, ids in enumerate(prompts)}
        save_file(logits, out / name / "logits.safetensors")
        print(json.dumps({"case": name, "result": form}), flush=True)


if __name__ == "__main__":
    main()

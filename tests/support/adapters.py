"""Writes LoRA adapters in the format of PEFT, and merges them into checkpoints by the formula of the paper."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ALL,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
    **fields: Any,
) -> Path:
    """Write a random adapter for a checkpoint, and return its folder. fields: others of `adapter_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    ranks = fields.get("rank_pattern", {})
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        projection = module.rpartition(".")[2]
        if name.endswith(".weight") and projection in targets:
            own = ranks.get(projection, rank)
            for side, shape in (("A", (own, weight.shape[1])), ("B", (weight.shape[0], own))):
                values = torch.randn(shape, generator=generator) * size / math.sqrt(shape[1])
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = values.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tests/base", "r": rank,
        "lora_alpha": alpha, "target_modules": list(targets), "bias": "none", "use_rslora": False, "use_dora": False,
        "modules_to_save": None, "fan_in_fan_out": False, "lora_dropout": 0.1, "inference_mode": True,
        "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    """Change fields of `adapter_config.json`."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def merge_adapter(model: Path, adapter: Path, out: Path) -> Path:
    """Write a copy of a checkpoint with W + alpha / r * B A (rslora: alpha / sqrt(r)), and return its folder."""
    shutil.copytree(model, out)
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(model / "model.safetensors")
    for name in list(weights):
        module = name.removesuffix(".weight")
        a = factors.get(f"base_model.model.{module}.lora_A.weight")
        if a is None:
            continue
        b = factors[f"base_model.model.{module}.lora_B.weight"]
        alpha = config["alpha_pattern"].get(module.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
        merged = weights[name].double() + scale * b.double() @ a.double()
        weights[name] = merged.to(weights[name].dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out

"""Configurations of vision-language models, for tiny random checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import make_tokenizer
from tests.support.transformers_checkpoints import EXPERTS, KINDS, LLAMA_LIKE, TWO_WINDOWS

# Positions with three axes: time, height and width. They are equal for text.
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SIGLIP = TOWER | {"model_type": "siglip_vision_model"}
CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}
QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
QWEN3_TOWER = QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
INTERN_TOWER = TOWER | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}
HALF_ROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}


def _kind(text_type: str, tower: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "text_config": LLAMA_LIKE | {"model_type": text_type} | fields,
        "vision_config": tower,
        "image_token_index": 5,
        "image_token_id": 5,
    }


# Model type to its configuration. Quire's own decoder computes the text of these.
OWN: dict[str, dict[str, Any]] = {
    "mistral3": _kind("mistral", TOWER | {"model_type": "pixtral", "head_dim": 16}, head_dim=16, sliding_window=None),
    "llava": _kind("llama", CLIP),
    "llava_next": _kind("mistral", CLIP, sliding_window=24),
    "llava_onevision": _kind("qwen2", SIGLIP),
    "qwen2_vl": _kind("qwen2_vl_text", {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}, **MROPE),
    "qwen2_5_vl": _kind("qwen2_5_vl_text", QWEN_TOWER, **MROPE),
    "qwen3_vl": _kind("qwen3_vl_text", QWEN3_TOWER, head_dim=16, **MROPE),
    "internvl": _kind("qwen3", INTERN_TOWER, head_dim=16),
    "idefics3": _kind("llama", TOWER | {"model_type": "idefics3_vision"}),
    "smolvlm": _kind("llama", TOWER | {"model_type": "smolvlm_vision"}),
    "gemma3": _kind("gemma3_text", SIGLIP, head_dim=16, **TWO_WINDOWS)
    | {"mm_tokens_per_image": 4, "boi_token_index": 6, "eoi_token_index": 7},
    "gemma4": _kind(
        "gemma4_text",
        TOWER | {"head_dim": 16},
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        **TWO_WINDOWS,
    ),
}
# Transformers computes the text of these.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": _kind("qwen3_vl_moe_text", QWEN3_TOWER, head_dim=16, **MROPE, **EXPERTS),
    "glm4v": _kind("glm4v_text", QWEN_TOWER, rope_parameters=HALF_ROPE),
    "aya_vision": _kind("cohere2", SIGLIP, **TWO_WINDOWS),
    "kimi_k25": _kind("deepseek_v3", TOWER, **KINDS["deepseek-v3"][1]),
    "exaone4_5": _kind("exaone4", QWEN_TOWER),
}


def make_vision(folder: Path, kind: str, **fields: Any) -> Path:
    """Write a checkpoint of OWN or OTHERS with a tokenizer into `folder`, and return the folder.

    fields: of the text model.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    values = (OWN | OTHERS)[kind]
    config = AutoConfig.for_model(kind, **copy.deepcopy(values | {"text_config": values["text_config"] | fields}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and name.endswith("weight"):
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=0.2)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder

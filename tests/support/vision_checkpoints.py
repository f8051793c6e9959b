"""Configurations of vision-language models, for tiny random checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from tests.support.architectures import CONV_LAYERS, HEAD, INDEXER, LATENT, LINEAR, NEXT_LAYERS, ROUTED, SHARED_EXPERT
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
LLAMA4_TOWER = TOWER | {"intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32}
LLAMA4_TOWER |= {"projector_output_dim": 32}
LFM_TOWER = TOWER | {"model_type": "siglip2_vision_model", "num_patches": 4}
DOTS_TOWER = TOWER | {"adapter_in_dim": 32, "adapter_out_dim": 64, "mlp_layer_types": ["dense"]}
DOTS_AUDIO = TOWER | {"adapter_input_size": 32, "adapter_out_dim": 64, "downsample_hidden_size": 16}
DOTS_WINDOW = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16}
DOTS_WINDOW |= {"head_dim": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
MLLAMA_TOWER = TOWER | {"num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2, "max_num_tiles": 4}
MLLAMA_TOWER |= {"vision_output_dim": 64, "intermediate_layers_indices": [0]}
EMU_IMAGES = {"codebook_size": 16, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "hidden_size": 32}
EMU_IMAGES |= {"channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": []}
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
    "vipllava": _kind("llama", CLIP) | {"vision_feature_layer": [-2, -1]},
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
    "glm46v": _kind("glm4v_text", QWEN_TOWER | {"model_type": "glm4v_vision"}, rope_parameters=HALF_ROPE),
    "aya_vision": _kind("cohere2", SIGLIP, **TWO_WINDOWS),
    "kimi_k25": _kind("deepseek_v3", TOWER, **KINDS["deepseek-v3"][1]) | {"projection_hidden_size": 32},
    "exaone4_5": _kind("exaone4", QWEN_TOWER | {"num_key_value_heads": 2}),
    # These types have another class for text alone.
    "qwen3_5": _kind("qwen3_5_text", QWEN3_TOWER, **HEAD, **LINEAR, **NEXT_LAYERS),
    "qwen3_5_moe": _kind("qwen3_5_moe_text", QWEN3_TOWER, **HEAD, **EXPERTS, **SHARED_EXPERT, **LINEAR, **NEXT_LAYERS),
    "qwen4_exp": _kind("qwen4_exp_text", QWEN3_TOWER, **HEAD, **EXPERTS),
    "llama4": _kind(
        "llama4_text", LLAMA4_TOWER, attention_chunk_size=32, **HEAD, **EXPERTS | {"num_experts_per_tok": 1}
    ),
    "emu3": {
        "text_config": LLAMA_LIKE | {"model_type": "emu3_text_model"},
        "vq_config": EMU_IMAGES,
        "vocabulary_map": {"<image>": 5},
    },
    "dots3_note": _kind(
        "dots3_note_text",
        DOTS_TOWER,
        **LATENT | ROUTED | INDEXER | {"head_dim": 32, "index_topk": 2048},
        shared_experts_intermediate_size=32,
        sliding_window=24,
        **{f"swa_{name}": value for name, value in DOTS_WINDOW.items()},
    )
    | {"audio_config": DOTS_AUDIO},
    "glm4v_moe": _kind("glm4v_moe_text", QWEN_TOWER, **ROUTED, **HEAD, rope_parameters=HALF_ROPE),
    "lfm2_vl": _kind("lfm2", LFM_TOWER, **CONV_LAYERS),
    "cohere2_vision": _kind("cohere2", SIGLIP, **TWO_WINDOWS),
    "minimax_m3_vl": _kind("minimax_m3_vl_text", TOWER, **HEAD, **EXPERTS),
}
# These are refused.
REFUSED: dict[str, dict[str, Any]] = {
    "mllama": _kind("mllama_text_model", MLLAMA_TOWER, cross_attention_layers=[1]),
    "paligemma": _kind("gemma", SIGLIP, **HEAD),
}
VISION = OWN | OTHERS | REFUSED


def make_vision(
    folder: Path, kind: str, tower: dict[str, Any] | None = None, top: dict[str, Any] | None = None, **fields: Any
) -> Path:
    """Write a checkpoint of VISION with a tokenizer into `folder`, and return the folder.

    tower: fields of the vision tower. top: of the whole model. fields: of the text model.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    values = VISION[kind]
    values = values | {"text_config": values["text_config"] | fields} | (top or {})
    if tower:
        values["vision_config"] = values["vision_config"] | tower
    config = AutoConfig.for_model(kind, **copy.deepcopy(values))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and name.endswith("weight"):
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=0.2)
            for name, buffer in model.named_buffers():  # of the tower of Gemma 4
                if name.endswith(("std_bias", "std_scale")):
                    buffer.uniform_(0.5, 1.5)
                elif name.endswith(("put_min", "put_max")):
                    buffer.fill_(-2.0 if name.endswith("_min") else 2.0)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder

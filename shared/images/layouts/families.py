"""The layout of a model, from the class of its processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.shared.images.layouts import (
    aya_vision,
    cohere2_vision,
    gemma3,
    gemma4,
    glm4v,
    idefics3,
    internvl,
    kimi_k25,
    lfm2_vl,
    llama4,
    llava,
    llava_next,
    llava_onevision,
    phi4_multimodal,
    pixtral,
    qwen_vl,
)
from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout, NoLayout
from quire.shared.model.fields import config_fields
from quire.shared.model.files import ModelError
from quire.shared.model.folder import is_gguf
from quire.shared.process.errors import CheckpointError

# Class of the processor to its rule.
RULES: dict[str, Callable[[ProcessorFiles], Layout]] = {
    "AyaVisionProcessor": aya_vision.read,
    "Cohere2VisionProcessor": cohere2_vision.read,
    "Dots3NoteProcessor": qwen_vl.read_dots3_note,
    "Exaone4_5_Processor": qwen_vl.read,
    "Gemma3Processor": gemma3.read,
    "Gemma4Processor": gemma4.read,
    "Glm46VProcessor": glm4v.read,
    "Glm4vProcessor": glm4v.read,
    "Idefics3Processor": idefics3.read,
    "InternVLProcessor": internvl.read,
    "Kimi_K25Processor": kimi_k25.read,
    "Lfm2VlProcessor": lfm2_vl.read,
    "Llama4Processor": llama4.read,
    "LlavaNextProcessor": llava_next.read,
    "LlavaOnevisionProcessor": llava_onevision.read,
    "LlavaProcessor": llava.read,
    "MiniMaxM3VLProcessor": qwen_vl.read_minimax_m3_vl,
    "Phi4MultimodalProcessor": phi4_multimodal.read,
    "PixtralProcessor": pixtral.read,
    "Qwen2VLProcessor": qwen_vl.read,
    "Qwen2_5_VLProcessor": qwen_vl.read,
    "Qwen3VLProcessor": qwen_vl.read,
    "SmolVLMProcessor": idefics3.read_smolvlm,
}
# Types of models whose images workers compute, and those of them whose image tokens have positions with three axes.
ONE_AXIS = (
    *("aya_vision", "cohere2_vision", "dots3_note", "exaone4_5", "gemma3", "gemma4", "idefics3", "internvl"),
    *("kimi_k25", "lfm2_vl", "llama4", "llava", "llava_next", "llava_onevision", "minimax_m3_vl", "mistral3"),
    *("smolvlm", "vipllava"),
)
THREE_AXES = (
    *("glm46v", "glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
)
# Type of the model to the class of its processor, for folders that do not name it.
BY_MODEL_TYPE = {
    "aya_vision": "AyaVisionProcessor",
    "cohere2_vision": "Cohere2VisionProcessor",
    "dots3_note": "Dots3NoteProcessor",
    "exaone4_5": "Exaone4_5_Processor",
    "gemma3": "Gemma3Processor",
    "gemma4": "Gemma4Processor",
    "glm46v": "Glm46VProcessor",
    "glm4v": "Glm4vProcessor",
    "glm4v_moe": "Glm4vProcessor",
    "idefics3": "Idefics3Processor",
    "internvl": "InternVLProcessor",
    "kimi_k25": "Kimi_K25Processor",
    "lfm2_vl": "Lfm2VlProcessor",
    "llama4": "Llama4Processor",
    "llava": "LlavaProcessor",
    "llava_next": "LlavaNextProcessor",
    "llava_onevision": "LlavaOnevisionProcessor",
    "minimax_m3_vl": "MiniMaxM3VLProcessor",
    "mistral3": "PixtralProcessor",
    "phi4_multimodal": "Phi4MultimodalProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen4_exp": "Qwen3VLProcessor",
    "smolvlm": "SmolVLMProcessor",
    "vipllava": "LlavaProcessor",
}


def read_layout(folder: Path) -> Layout | None:
    """Return the layout of the images of a model; None for a model of text alone and for a GGUF file.

    Raise NoLayout with the reason if the model has images and no rule tells their tokens: it serves text alone. Raise
    CheckpointError for a folder without a valid `config.json`.
    """
    config = config_fields(folder)
    if is_gguf(folder) or config.get("vision_config") is None:
        return None
    try:
        files = ProcessorFiles(folder, config)
        processor = files.processor_class(BY_MODEL_TYPE)
        if processor not in RULES:
            raise NoLayout(f"no rule for the images of {processor:.100}")
        return RULES[processor](files)
    except (CheckpointError, ModelError) as error:
        raise NoLayout(str(error).removesuffix(".")) from error

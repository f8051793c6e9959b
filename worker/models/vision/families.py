"""Which vision-language models get embeddings of images here, and how their processors call their image processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.shared.images.layouts.families import BY_MODEL_TYPE, ONE_AXIS, THREE_AXES
from quire.shared.images.layouts.files import IMAGES, LEGACY_TOKENS, PROCESSOR, TOKENIZER, ProcessorFiles
from quire.shared.images.layouts.layout import NoLayout
from quire.shared.model.fields import config_fields

# Arguments that a class of processors gives to its image processor: `images_kwargs` of the class in Transformers. With
# a list of images, LlavaOnevisionProcessor gives each its tiles.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AyaVisionProcessor": {"crop_to_patches": True},
    "Idefics3Processor": {"return_row_col_info": True},
    "InternVLProcessor": {"crop_to_patches": True},
    "LlavaNextProcessor": {"do_pad": True},
    "LlavaOnevisionProcessor": {},
    "LlavaProcessor": {},
    "PixtralProcessor": {},
    "Qwen2VLProcessor": {},
    "Qwen2_5_VLProcessor": {},
    "Qwen3VLProcessor": {},
    "SmolVLMProcessor": {"return_row_col_info": True},
}
# The files of a checkpoint that describe its processor.
FILES = (IMAGES, LEGACY_TOKENS, PROCESSOR, TOKENIZER)
AXES = "positions of image tokens with three axes need mrope_section in config.json and Quire's own decoder"
BOTH_WAYS = "attention between the tokens of an image in both directions is not computed"
# Model types whose text alone is served, and the reason.
TEXT_ALONE = {
    "gemma3": BOTH_WAYS,
    "gemma4": BOTH_WAYS,
}


class NoImages(Exception):
    """A checkpoint without embeddings of images. The text is the reason, in one line."""


def image_arguments(folder: Path, has_axes: bool) -> dict[str, Any]:
    """Return the arguments for the image processor of a checkpoint. Raises NoImages, ModelError, CheckpointError.

    has_axes: the text model has positions with three axes.
    """
    config = config_fields(folder)
    if (model_type := config.get("model_type")) in THREE_AXES and not has_axes:
        raise NoImages(AXES)
    if model_type not in ONE_AXIS + THREE_AXES:
        raise NoImages(TEXT_ALONE.get(str(model_type), f"images of the model type {model_type} are not computed"))
    try:
        files = ProcessorFiles(folder, config)
        name = files.processor_class(BY_MODEL_TYPE)
    except NoLayout as error:
        raise NoImages(str(error)) from error
    if name not in ARGUMENTS:
        raise NoImages(f"images of {name} are not computed")
    if not files.images.names():
        raise NoImages(f"{files.images.where} is missing or empty")
    if name == "PixtralProcessor":
        return {
            "patch_size": files.processor.integer("patch_size", 16) * files.processor.integer("spatial_merge_size", 1)
        }
    return ARGUMENTS[name]


def image_token_id(folder: Path) -> int:
    """Return the token in whose places embeddings of images go. Raises CheckpointError."""
    config = config_fields(folder)
    return config.integer("image_token_index" if config.get("image_token_id") is None else "image_token_id", minimum=0)

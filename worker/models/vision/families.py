"""Which vision-language models get embeddings of images here, and how their processors call their image processors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from quire.shared.images.layouts.families import BY_MODEL_TYPE, ONE_AXIS, THREE_AXES, read_layout
from quire.shared.images.layouts.files import IMAGES, LEGACY_TOKENS, PROCESSOR, TOKENIZER, ProcessorFiles
from quire.shared.images.layouts.layout import LayoutError, NoLayout
from quire.shared.model.fields import config_fields
from quire.shared.process.errors import CheckpointError

# Arguments that a class of processors gives to its image processor: `images_kwargs` of the class in Transformers. With
# a list of images, LlavaOnevisionProcessor gives each its tiles.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AyaVisionProcessor": {"crop_to_patches": True},
    "Cohere2VisionProcessor": {},
    "Dots3NoteProcessor": {},
    "Exaone4_5_Processor": {},
    "Gemma3Processor": {"do_convert_rgb": True, "do_pan_and_scan": False},
    "Gemma4Processor": {},
    "Glm46VProcessor": {},
    "Glm4vProcessor": {},
    "Idefics3Processor": {"return_row_col_info": True},
    "InternVLProcessor": {"crop_to_patches": True},
    "Kimi_K25Processor": {},
    "Lfm2VlProcessor": {},
    "Llama4Processor": {},
    "LlavaNextProcessor": {"do_pad": True},
    "LlavaOnevisionProcessor": {},
    "LlavaProcessor": {},
    "MiniMaxM3VLProcessor": {},
    "PixtralProcessor": {},
    "Qwen2VLProcessor": {},
    "Qwen2_5_VLProcessor": {},
    "Qwen3VLProcessor": {},
    "SmolVLMProcessor": {"return_row_col_info": True},
}
# Images of (width, height) pixels that have as many tokens as any.
LARGE = ((8192, 8192), (8192, 2048), (2048, 8192), (1024, 1024), (512, 512))
# The files of a checkpoint that describe its processor.
FILES = (IMAGES, LEGACY_TOKENS, PROCESSOR, TOKENIZER)
# Processors whose image processors Transformers has for torchvision alone: their modules and classes.
FOR_TORCHVISION = {
    "Cohere2VisionProcessor": ("cohere2_vision.image_processing_cohere2_vision", "Cohere2VisionImageProcessor"),
    "Kimi_K25Processor": ("kimi_k25.image_processing_kimi_k25", "Kimi_K25ImageProcessor"),
    "Lfm2VlProcessor": ("lfm2_vl.image_processing_lfm2_vl", "Lfm2VlImageProcessor"),
    "Llama4Processor": ("llama4.image_processing_llama4", "Llama4ImageProcessor"),
    "MiniMaxM3VLProcessor": ("minimax_m3_vl.image_processing_minimax_m3_vl", "MiniMaxM3VLImageProcessor"),
}
AXES = "positions of image tokens with three axes need a valid mrope_section in config.json"
# Types of models in whose text models the tokens of an image may attend to each other in both directions.
MAY_BE_BOTH_WAYS = ("gemma3", "gemma4")
BOTH_WAYS = "attention between the tokens of an image in both directions needs Quire's own decoder"
# Model types whose text alone is served, and the reason.
TEXT_ALONE = {"emu3": "images that become tokens of the vocabulary are not computed"}


class Preparation(NamedTuple):
    """How an image becomes the input of a tower."""

    processor: str  # the name of the class in Transformers
    arguments: dict[str, Any]  # of each call of its image processor


class NoImages(Exception):
    """A checkpoint without embeddings of images. The text is the reason, in one line."""


def preparation(folder: Path, both_ways: bool | None) -> Preparation:
    """Return how images of a checkpoint are prepared. Raises NoImages, ModelError, CheckpointError.

    both_ways: as for `load_tower`.
    """
    config = config_fields(folder)
    if (model_type := config.get("model_type")) in MAY_BE_BOTH_WAYS and both_ways is None:
        raise NoImages(BOTH_WAYS)
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
        size = files.processor.integer("patch_size", 16) * files.processor.integer("spatial_merge_size", 1)
        return Preparation(name, {"patch_size": size})
    return Preparation(name, ARGUMENTS[name])


def image_grid(folder: Path, has_axes: bool) -> Callable[[int, int], tuple[int, int]] | None:
    """Return the rows and columns of the tokens of an image of (width, height) pixels, if the tokens have three axes.

    has_axes: the text model computes such positions. Raises NoImages, CheckpointError.
    """
    if config_fields(folder).get("model_type") not in THREE_AXES:
        return None
    if not has_axes:
        raise NoImages(AXES)
    try:
        layout = read_layout(folder)
    except NoLayout as error:
        raise NoImages(str(error)) from error
    if layout is None or layout.grid is None:
        raise NoImages("the tokens of an image are no grid")
    return layout.grid


def most_image_tokens(folder: Path) -> int:
    """Return the tokens of the largest image, as far as large ones of several shapes tell; else a large number."""
    found = []
    with suppress(NoLayout, CheckpointError):
        if (layout := read_layout(folder)) is not None:
            for shape in LARGE:
                with suppress(LayoutError):
                    found.append(layout.expand(*shape).num_tokens)
    return max(found, default=sys.maxsize)


def image_token_id(folder: Path) -> int:
    """Return the token in whose places embeddings of images go. Raises CheckpointError."""
    config = config_fields(folder)
    return config.integer("image_token_index" if config.get("image_token_id") is None else "image_token_id", minimum=0)

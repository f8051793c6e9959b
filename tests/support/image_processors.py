"""Processors of Transformers with their image processors, with a tokenizer of bytes, and their files.

Some image processors need torchvision. A stand-in has the functions that they call, on images without pixels.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers.image_processing_backends as backends
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.processing_utils import ProcessorMixin

# The image token is the first after those of bytes.
CONFIG = {"vision_config": {}, "image_token_id": 256}


@dataclass(frozen=True)
class Family:
    """A processor and its image processor: modules below transformers.models, and classes.

    tokens: texts of special tokens; the first is the image token. named: those that the tokenizer names.
    processor, images: fields of its two files, and further choices of fields.
    """

    model_type: str
    processor_class: str
    image_class: str
    tokens: tuple[str, ...]
    named: dict[str, str] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    others: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()  # (images, processor)


QWEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
QWEN_IMAGES = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
QWEN3_SIZE = {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 1 << 22}}
QWEN_SIZES = (
    (QWEN3_SIZE, {}),
    ({"min_pixels": 3000, "max_pixels": 100_000, "merge_size": 3, "patch_size": 10}, {}),
    ({"size": {"shortest_edge": 1, "longest_edge": 50_000}, "max_pixels": 30_000}, {}),
)
LFM = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
LFM_PLACES = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11))
COHERE = {"image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"}
COHERE |= {"img_line_break_token": "<|IMG_LINE_BREAK|>"}
MINIMAX = ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
GLM = ("<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>")
GLM_SIZES = (
    ({"size": {"shortest_edge": 5000, "longest_edge": 500_000}, "merge_size": 1}, {}),
    ({"temporal_patch_size": 4, "patch_size": 16}, {}),
)
ROWS_AND_COLUMNS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
IDEFICS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *ROWS_AND_COLUMNS)
IDEFICS_SIZES = (
    ({"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, {"image_seq_len": 64}),
    ({"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 999}}, {"image_seq_len": 9}),
    ({"size": {"longest_edge": 301}, "max_image_size": {"longest_edge": 7}}, {"image_seq_len": 1}),
    ({"size": {"height": 700, "width": 900}}, {"image_seq_len": 3}),
    ({"do_image_splitting": False}, {}),
)
GOT_SIZES = (
    ({"size": {"height": 448, "width": 448}, "max_patches": 6}, {}),
    ({"size": [100, 150], "min_patches": 3, "max_patches": 40}, {}),
    ({"size": 64, "max_patches": 1}, {}),
)
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
PINPOINTS = [[384, 768], [768, 384], [768, 768], [1152, 384], [384, 1152]]
AYA = ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<image>")
LLAMA4 = ("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")

FAMILIES = {
    "qwen2_vl": Family(
        "qwen2_vl", "qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor", QWEN_IMAGES, QWEN, others=QWEN_SIZES
    ),
    "qwen2_5_vl": Family(
        "qwen2_5_vl", "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor", QWEN_IMAGES, QWEN, others=QWEN_SIZES
    ),
    "qwen3_vl": Family(
        "qwen3_vl", "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor", QWEN_IMAGES, QWEN, others=QWEN_SIZES
    ),
    "qwen3_5": Family(
        "qwen3_5",
        "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
        QWEN_IMAGES,
        ("<|pad of an image|>", *QWEN[1:]),
        named={"image_token": "<|pad of an image|>"},
        others=QWEN_SIZES,
    ),
    "exaone4_5": Family(
        "exaone4_5", "exaone4_5.processing_exaone4_5.Exaone4_5_Processor", QWEN_IMAGES, QWEN, others=QWEN_SIZES
    ),
    "dots3_note": Family(
        "dots3_note",
        "dots3_note.processing_dots3_note.Dots3NoteProcessor",
        QWEN_IMAGES,
        ("<|imgpad|>", "<|video_pad|>", "<|audio_comp_pad|>"),
        others=QWEN_SIZES,
    ),
    "minimax_m3_vl": Family(
        "minimax_m3_vl",
        "minimax_m3_vl.processing_minimax_m3_vl.MiniMaxM3VLProcessor",
        "minimax_m3_vl.image_processing_minimax_m3_vl.MiniMaxM3VLImageProcessor",
        MINIMAX,
        others=QWEN_SIZES,
    ),
    "cohere2_vision": Family(
        "cohere2_vision",
        "cohere2_vision.processing_cohere2_vision.Cohere2VisionProcessor",
        "cohere2_vision.image_processing_cohere2_vision.Cohere2VisionImageProcessor",
        tuple(COHERE.values()),
        named=COHERE,
        others=(
            ({"size": {"height": 300, "width": 300}, "max_patches": 20, "patch_size": 3}, {}),
            ({"size": 100, "max_patches": 5}, {}),
            ({"crop_to_patches": False}, {}),
        ),
    ),
    "lfm2_vl": Family(
        "lfm2_vl",
        "lfm2_vl.processing_lfm2_vl.Lfm2VlProcessor",
        "lfm2_vl.image_processing_lfm2_vl.Lfm2VlImageProcessor",
        (*LFM, *LFM_PLACES),
        others=(
            ({"tile_size": 256, "max_tiles": 7, "min_tiles": 1, "max_pixels_tolerance": 1.0}, {}),
            ({"use_thumbnail": False, "encoder_patch_size": 14, "tile_size": 448}, {}),
            ({"do_image_splitting": False, "min_image_tokens": 5, "max_image_tokens": 40}, {}),
        ),
    ),
    "glm4v": Family(
        "glm4v",
        "glm4v.processing_glm4v.Glm4vProcessor",
        "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil",
        GLM,
        others=GLM_SIZES,
    ),
    "glm46v": Family(
        "glm46v",
        "glm46v.processing_glm46v.Glm46VProcessor",
        "glm46v.image_processing_pil_glm46v.Glm46VImageProcessorPil",
        GLM,
        others=GLM_SIZES,
    ),
    "gemma3": Family(
        "gemma3",
        "gemma3.processing_gemma3.Gemma3Processor",
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        others=(({"size": {"height": 896, "width": 896}, "do_pan_and_scan": True}, {"image_seq_length": 4}),),
    ),
    "gemma4": Family(
        "gemma4",
        "gemma4.processing_gemma4.Gemma4Processor",
        "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",
        ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"),
        named={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        others=(
            ({"max_soft_tokens": 70}, {}),
            ({"max_soft_tokens": 1120, "pooling_kernel_size": 2, "patch_size": 14}, {}),
        ),
    ),
    "llava": Family(
        "llava",
        "llava.processing_llava.LlavaProcessor",
        "llava.image_processing_pil_llava.LlavaImageProcessorPil",
        ("<image>",),
        processor=LLAVA,
        others=(
            ({"do_center_crop": False}, {"vision_feature_select_strategy": "full"}),
            ({"do_center_crop": False, "size": 100, "do_pad": True}, {}),
            ({"crop_size": 336, "size": {"shortest_edge": 336}}, {}),
            ({"crop_size": {"height": 300, "width": 100}}, {"num_additional_image_tokens": 0}),
        ),
    ),
    "llava with CLIP": Family(
        "llava",
        "llava.processing_llava.LlavaProcessor",
        "clip.image_processing_pil_clip.CLIPImageProcessorPil",
        ("<pic>",),
        processor=LLAVA | {"image_token": "<pic>"},
        others=(({"size": 336, "crop_size": 336}, {}),),
    ),
    "llava with SigLIP": Family(
        "llava",
        "llava.processing_llava.LlavaProcessor",
        "siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
        ("<image>",),
        processor={"patch_size": 14, "vision_feature_select_strategy": "full"},
        others=(({"size": {"height": 384, "width": 336}}, {}), ({"size": 70}, {})),
    ),
    "llava_next": Family(
        "llava_next",
        "llava_next.processing_llava_next.LlavaNextProcessor",
        "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil",
        ("<image>",),
        processor=LLAVA,
        others=(
            ({"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}, {}),
            ({"crop_size": 384, "size": 384, "image_grid_pinpoints": PINPOINTS}, {"patch_size": 27}),
        ),
    ),
    "llava_onevision": Family(
        "llava_onevision",
        "llava_onevision.processing_llava_onevision.LlavaOnevisionProcessor",
        "llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
        ("<image>", "<video>"),
        processor={"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
        others=(
            ({"image_grid_pinpoints": PINPOINTS}, {"vision_aspect_ratio": "anyres_max_4", "num_image_tokens": 196}),
            ({}, {"vision_aspect_ratio": "anyres_max_1", "vision_feature_select_strategy": "default"}),
        ),
    ),
    "pixtral": Family(
        "mistral3",
        "pixtral.processing_pixtral.PixtralProcessor",
        "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        others=(
            ({"size": {"longest_edge": 1540}, "patch_size": 14}, {"patch_size": 14, "spatial_merge_size": 2}),
            ({"size": {"height": 300, "width": 500}}, {"patch_size": 7, "spatial_merge_size": 3}),
        ),
    ),
    "internvl": Family(
        "internvl",
        "internvl.processing_internvl.InternVLProcessor",
        "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        named={
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        others=tuple((images, {"image_seq_length": 5}) for images, _ in GOT_SIZES),
    ),
    "aya_vision": Family(
        "aya_vision",
        "aya_vision.processing_aya_vision.AyaVisionProcessor",
        "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        AYA,
        others=tuple((images, {"downsample_factor": 2, "patch_size": 14}) for images, _ in GOT_SIZES),
    ),
    "idefics3": Family(
        "idefics3",
        "idefics3.processing_idefics3.Idefics3Processor",
        "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
        IDEFICS,
        others=IDEFICS_SIZES,
    ),
    "smolvlm": Family(
        "smolvlm",
        "smolvlm.processing_smolvlm.SmolVLMProcessor",
        "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
        (*IDEFICS, "<whole>"),
        named={"global_image_token": "<whole>"},
        others=IDEFICS_SIZES,
    ),
    "llama4": Family(
        "llama4",
        "llama4.processing_llama4.Llama4Processor",
        "llama4.image_processing_llama4.Llama4ImageProcessor",
        LLAMA4,
        others=(
            ({"resize_to_max_canvas": True, "max_patches": 9}, {}),
            ({"size": 100, "max_patches": 30}, {"pixel_shuffle_ratio": 0.7, "patch_size": 10}),
        ),
    ),
    "kimi_k25": Family(
        "kimi_k25",
        "kimi_k25.processing_kimi_k25.Kimi_K25Processor",
        "kimi_k25.image_processing_kimi_k25.Kimi_K25ImageProcessor",
        ("<|media_pad|>", "<|kimi_k25_video_placeholder|>"),
        others=(
            ({"size": {"max_height": 20, "max_width": 20}, "max_patches": 300, "patch_size": 10, "merge_size": 3}, {}),
        ),
    ),
    "phi4_multimodal": Family(
        "phi4_multimodal",
        "phi4_multimodal.processing_phi4_multimodal.Phi4MultimodalProcessor",
        "phi4_multimodal.image_processing_phi4_multimodal.Phi4MultimodalImageProcessor",
        ("<|endoftext10|>", "<|endoftext11|>"),
        named={"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"},
        others=(({"dynamic_hd": 9}, {}), ({"size": {"height": 210, "width": 210}, "dynamic_hd": 20}, {})),
    ),
}


def make_processor(family: Family, images: dict[str, Any], processor: dict[str, Any]) -> Any:
    """Return a processor, made from the fields of its files as Transformers makes it, without videos and audio."""
    with _torchvision():
        image_processor = _load(family.image_class).from_dict(dict(images))
        processor_class = _load(family.processor_class)
        parts = dict.fromkeys(processor_class.get_attributes())
        parts |= {"image_processor": image_processor, "tokenizer": make_byte_tokenizer(family)}
        with (
            mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"),
            # SmolVLM asks for a package that writes the number of frames of a video.
            mock.patch(f"{processor_class.__module__}.num2words", object(), create=True),
        ):
            return processor_class(**parts, **family.processor | processor)


def write_files(folder: Path, family: Family, images: dict[str, Any], processor: dict[str, Any]) -> Path:
    """Write the files of a model folder with these fields, and return the folder."""
    name = _name(family.image_class).removesuffix("Pil")
    _write(folder / "config.json", CONFIG | {"model_type": family.model_type})
    _write(folder / "preprocessor_config.json", {"image_processor_type": name} | images)
    fields = {"processor_class": _name(family.processor_class)} | family.processor | processor
    _write(folder / "processor_config.json", fields)
    make_byte_tokenizer(family).save_pretrained(folder)
    return folder


def save(folder: Path, family: Family, processor: Any) -> Path:
    """Let Transformers write the files of a processor into a folder with a configuration, and return the folder."""
    parts = mock.patch.object(type(processor), "get_attributes", return_value=["image_processor", "tokenizer"])
    with _torchvision(), parts:
        processor.save_pretrained(folder)
    _write(folder / "config.json", CONFIG | {"model_type": family.model_type})
    return folder


def make_byte_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, two newlines as one token, and the tokens of the family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(family.tokens))
    tokenizer.add_tokens(["\n\n"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!", extra_special_tokens=dict(family.named))


@contextmanager
def without_pixels() -> Iterator[None]:
    """Images are resized to arrays that share one pixel. Lengths of 0 are refused, as Pillow and torchvision do."""

    def resize(image: Any, size: Sequence[int], **_: Any) -> Any:
        _check(size)
        return np.broadcast_to(np.uint8(0), (*image.shape[:-2], *size))

    gemma4 = "transformers.models.gemma4.image_processing_pil_gemma4.resize"
    with _torchvision(), mock.patch.object(backends, "np_resize", resize), mock.patch(gemma4, resize):
        yield


def blank(width: int, height: int) -> torch.Tensor:
    """Return an image whose pixels are one in memory."""
    return torch.zeros((), dtype=torch.uint8).expand(3, height, width)


def _check(size: Sequence[int]) -> None:
    if min(size) < 1:
        raise ValueError(f"an image of {tuple(size)} pixels")


@contextmanager
def _torchvision() -> Iterator[None]:
    """A stand-in for the functions of torchvision, while processors are imported and called."""
    names = [
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ]
    modules = {name: ModuleType(name) for name in names}
    modules[names[0]].__spec__ = importlib.machinery.ModuleSpec(names[0], None)
    functions: Any = modules[names[-1]]
    functions.resize = _resize_tensor
    functions.pad = _pad_tensor
    functions.InterpolationMode = mock.MagicMock()
    modules[names[2]].functional = functions  # type: ignore[attr-defined]
    # Image processors that the worker has loaded call its own functions.
    for name in [name for name in sys.modules if name.startswith("transformers.models.")]:
        if "image_processing_" in name and hasattr(sys.modules[name], "tvF"):
            del sys.modules[name]
    before = set(sys.modules)
    sys.modules.update({name: module for name, module in modules.items() if name not in before})
    try:
        with (
            mock.patch.object(backends, "tvF", functions, create=True),
            mock.patch.object(backends, "pil_torch_interpolation_mapping", mock.MagicMock()),
        ):
            yield
    finally:
        # Other modules stay: a second import would make a second class of each configuration.
        for name in sys.modules.keys() - before:
            if name in modules or "processing" in name.rpartition(".")[2]:
                del sys.modules[name]


def _resize_tensor(image: torch.Tensor, size: Sequence[int], **_: Any) -> torch.Tensor:
    _check(size)
    return image.new_zeros(()).expand(*image.shape[:-2], *size)


def _pad_tensor(image: torch.Tensor, padding: Sequence[int], **_: Any) -> torch.Tensor:
    left, top, right, bottom = padding
    height, width = image.shape[-2:]
    return image.new_zeros(()).expand(*image.shape[:-2], height + top + bottom, width + left + right)


def _load(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def _name(path: str) -> str:
    return path.rsplit(".", 1)[1]


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields))

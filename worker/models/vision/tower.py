"""The vision tower and the projector of a checkpoint, as Transformers computes them, without the text model.

The embeddings of an image are what the class of the model in Transformers puts in the places of its image tokens.
Images are computed one by one, so that embeddings depend on the image alone.
"""

from __future__ import annotations

import inspect
import io
import logging
import math
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from quire.shared.images.picture import picture, size
from quire.shared.model.files import ModelError
from quire.shared.process.errors import CheckpointError
from quire.worker.lean_torch import complete_torch
from quire.worker.models.files.tensor_names import OF_TEXT
from quire.worker.models.vision.families import (
    FOR_TORCHVISION,
    NoImages,
    image_grid,
    image_token_id,
    most_image_tokens,
    preparation,
)
from quire.worker.models.vision.torchvision_functions import RESAMPLING, image_processor_class

log = logging.getLogger(__name__)

# Attributes that hold other parts than the tower and the projector, in the model and in its body.
OTHER_PARTS = ("language_model", "text_model", "audio_tower", "embed_audio")
# Limits of a file; gateways have lower limits of their own.
LIMITS = {"max_bytes": 1 << 30, "max_pixels": 1 << 28}
CHANNELS, WIDTHS = 3, 16
USUAL_PATCHES = 4.0  # of a token
SMALL = Image.new("RGB", (64, 64))
QUANTIZED = ("quantization_config", "compression_config")


class VisionTower:
    """The part of a model that makes embeddings of images."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        arguments: dict[str, Any],
        token_id: int,
        grid: Callable[[int, int], tuple[int, int]] | None = None,
        most_whole: int = 0,
        most_tokens: int = sys.maxsize,
    ) -> None:
        """model: of Transformers, without its text model. arguments: for each call of the image processor.

        grid: rows and columns of the tokens of an image of (width, height) pixels, if RoPE has axes for them.
        """
        self._grid, self.most_whole, self._most_tokens = grid, most_whole, most_tokens
        self.is_deep = bool(_deep_layers(model.config))
        self._model, self._processor, self._arguments = model, processor, arguments
        self.image_token_id = token_id
        self._features = (model if hasattr(model, "get_image_features") else model.model).get_image_features
        self._inputs = inspect.signature(self._features).parameters.keys()

    @property
    def nbytes(self) -> int:
        """Memory of the weights."""
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()))

    def embed(self, pictures: Sequence[bytes]) -> list[torch.Tensor]:
        """Return the embeddings [tokens, hidden] of each image file, in the type of the model and on its device.

        The width is a multiple of hidden if the first layers get more of the image.
        Raises what a decoder or a processor raises for a file that it cannot use.
        """
        with torch.inference_mode():
            return [self._embed(picture(data, **LIMITS)) for data in pictures]

    def run_bytes(self, num_tokens: int) -> int:
        """Return about how much memory a run takes for an image of this number of tokens, or for the largest one.

        A layer has about WIDTHS numbers per patch and channel. If the projector may take the output of any layer, the
        tower keeps that of each.
        """
        config = self._model.config
        fields = config.vision_config.to_dict()
        # In some configurations `hidden_size` is the width of the text model.
        width, depth = (
            next((fields[name] for name in names if isinstance(fields.get(name), int)), 0)
            for names in (("embed_dim", "hidden_size"), ("depth", "num_hidden_layers"))
        )
        kept = depth if getattr(config, "vision_feature_layer", None) is not None else 0
        patches = min(num_tokens, self._most_tokens) * self._patches_per_token
        return int(patches * width * (kept + WIDTHS) * self._model.dtype.itemsize)

    @cached_property
    def _patches_per_token(self) -> float:
        """Found by a run for a small image."""
        try:
            pixels = self.prepare([SMALL])["pixel_values"]
            SMALL.save(out := io.BytesIO(), "PNG")
            side = self._model.config.vision_config.patch_size
            area = side**2 if isinstance(side, int) else math.prod(side)
            # A processor makes patches [..., P, values], or pictures [..., channels, height, width].
            values = pixels.shape[-1] if pixels.dim() <= 3 else CHANNELS * area
            return float(pixels.numel()) / (values * len(self.embed([out.getvalue()])[0]))
        except Exception as error:  # a processor may raise anything
            log.debug("the patches of an image are not known: %r", error)
            return USUAL_PATCHES

    def grid(self, picture: bytes) -> tuple[int, int] | None:
        """Return the rows and columns of an image's tokens if RoPE has axes for them; else None. Raises as `embed`."""
        return None if self._grid is None else self._grid(*size(picture, **LIMITS))

    def prepare(self, images: list[Image.Image]) -> dict[str, Any]:
        """Return what the image processor makes of images."""
        return dict(self._processor(images=images, return_tensors="pt", **self._arguments))

    def _embed(self, image: Image.Image) -> torch.Tensor:
        made = self.prepare([image])
        inputs = {name: self._sent(made[name]) for name in made if name in self._inputs}
        found: Any = self._features(**inputs, return_dict=True)
        pooled = getattr(found, "pooler_output", None)
        if pooled is None:  # Llama 4 projects features elsewhere
            pooled = self._model.multi_modal_projector(found.last_hidden_state.flatten(0, -2))
        parts = [pooled, *(getattr(found, "deepstack_features", None) or ())]
        return torch.cat([_tokens(part) for part in parts], dim=1).to(self._model.dtype)

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        dtype = self._model.dtype if values.is_floating_point() else values.dtype
        return values.to(self._model.device, dtype)


def _is_of_others(name: str) -> bool:
    """Return whether a tensor belongs to the text model, alone or in a wrapper, or to another part."""
    return name.startswith(OF_TEXT) or not set(OTHER_PARTS).isdisjoint(name.split(".")[:2])


def _deep_layers(config: Any) -> list[int]:
    """Return the layers of a tower whose output goes to the first layers of the text model."""
    return list(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())


def _tokens(features: Any) -> torch.Tensor:
    """Return the features [tokens, hidden] of an image, which may be those of its parts."""
    if isinstance(features, torch.Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in features])


def find_tower(
    folder: Path, dtype: torch.dtype, device: torch.device | str, has_axes: bool, both_ways: bool | None
) -> tuple[VisionTower | None, str]:
    """Load the tower of a checkpoint, whose text is served in any case. Returns None and the reason without one."""
    try:
        return load_tower(folder, dtype, device, has_axes, both_ways), ""
    except (NoImages, ModelError, CheckpointError) as error:
        log.warning("this worker serves text alone: %s", error)
        return None, f"this worker computes no images: {error}"


def load_tower(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    has_axes: bool = False,
    both_ways: bool | None = None,
) -> VisionTower:
    """Load the vision tower and the projector of a checkpoint. Code of a checkpoint is never run.

    has_axes: the text model computes positions with three axes. both_ways: in the text model the tokens of an image
    attend to each other in both directions; None: Transformers computes the text model.
    Raises NoImages if images of the model are not computed, CheckpointError for files that are malformed.
    """
    (name, arguments), grid = preparation(folder, both_ways), image_grid(folder, has_axes)
    token_id = image_token_id(folder)
    complete_torch()  # Transformers builds models without memory
    try:
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText
        from transformers.utils import logging as transformers_logging
    except ImportError:
        raise NoImages("Transformers, which computes images, is not installed") from None
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        images: Any = AutoImageProcessor
        if name in FOR_TORCHVISION:
            processor = image_processor_class(*FOR_TORCHVISION[name]).from_pretrained(folder, **local)
            if processor.resample not in RESAMPLING:
                raise NoImages(f"resample of the image processor is {processor.resample}; supported: 2 and 3")
        else:
            processor = images.from_pretrained(folder, backend="pil", **local)
        config: Any = AutoConfig.from_pretrained(folder, **local)
        for field in QUANTIZED:
            if hasattr(config, field):
                delattr(config, field)
        if len(_deep_layers(config)) >= config.get_text_config().num_hidden_layers:
            raise NoImages("as many layers as the text model has get embeddings of images; the last one cannot")
        model_class: Any = AutoModelForImageTextToText._model_mapping[type(config)]
        model, info = _without_text(model_class).from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **local
        )
    except (NoImages, torch.OutOfMemoryError):
        raise
    except Exception as error:  # an unforeseen value of a field can make any line of a model's code raise
        reason = f"Transformers cannot load it ({type(error).__name__}: {str(error)[:300]})"
        raise CheckpointError(folder, reason, "config.json and the weights must be of the same model") from error
    _check(folder, model, info)
    for tensor in (*model.parameters(), *model.buffers()):
        # A copy: later changes of the mapped file would change the model.
        tensor.data = tensor.data.to(device, copy=True)
    most = getattr(processor, "max_soft_tokens", 0) or getattr(config, "mm_tokens_per_image", 0)
    sizes = grid, most if both_ways else 0, min(most or sys.maxsize, most_image_tokens(folder))
    tower = VisionTower(model.eval().requires_grad_(False), processor, arguments, token_id, *sizes)
    log.info("%s computes images: %.0f MiB", model_class.__name__, tower.nbytes / 2**20)
    return tower


def _without_text(model_class: Any) -> Any:
    """Return a class of the model of which no text model is loaded. Transformers builds models without memory."""

    class Tower(model_class):  # type: ignore[misc]
        _tied_weights_keys = None

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for owner in (self, getattr(self, "model", None)):
                for name in (*OTHER_PARTS, "lm_head"):
                    if hasattr(owner, name):
                        setattr(owner, name, None)

    return Tower


def _check(folder: Path, model: Any, info: dict[str, Any]) -> None:
    """Raise NoImages unless the checkpoint has all weights of the tower as numbers. info: from its loading."""
    for what in ("missing_keys", "mismatched_keys"):
        if keys := sorted(map(str, info[what])):
            raise NoImages(f"{folder} has other weights of the vision tower than config.json describes: {keys[0]}")
    others = sorted(name for name in info["unexpected_keys"] if not _is_of_others(name))
    if scales := [name for name in others if "scale" in name or "qweight" in name]:
        raise NoImages(f"the vision tower is quantised ({scales[0]}); its weights must be stored in 16 or 32 bits")
    if others:
        names = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
        log.warning("%s: %d tensors are not part of this model and are not used: %s", folder, len(others), names)
    if bad := [name for name, values in model.named_parameters() if not values.isfinite().all()]:
        raise NoImages(f"the tensor {bad[0]} of the vision tower has values that are not finite as {model.dtype}")

"""The functions of torchvision that image processors of Transformers call, with the results of torchvision.

Transformers has some image processors for torchvision alone. A wheel of torchvision fits one build of torch only, and
these processors call three of its functions. Where torchvision is installed, they call the originals.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from PIL.Image import Resampling
from torch.nn import functional as F

NAME = "torchvision.transforms.v2.functional"


class InterpolationMode(Enum):
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"  # Transformers asks whether it is this one


# By the number that files of image processors have.
RESAMPLING = {
    Resampling.BILINEAR: InterpolationMode.BILINEAR,
    Resampling.BICUBIC: InterpolationMode.BICUBIC,
}


def resize(
    image: torch.Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> torch.Tensor:
    """Return images [..., C, H, W] resized to (height, width)."""
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    stacked = image.reshape(-1, *image.shape[-3:])
    mode: Any = {"mode": interpolation.value, "align_corners": False, "antialias": antialias}
    return F.interpolate(stacked, size=list(size), **mode).reshape(*image.shape[:-2], *size)


def pad(
    image: torch.Tensor, padding: Sequence[int], fill: float | Sequence[float] = 0, padding_mode: str = "constant"
) -> torch.Tensor:
    """Return images [..., C, H, W] with columns and rows more. padding: left, top, right, bottom. fill: of channels."""
    assert padding_mode == "constant", padding_mode
    left, top, right, bottom = padding
    height, width = image.shape[-2:]
    values = torch.as_tensor(fill).to(image.dtype).reshape(-1, 1, 1)
    padded = values.expand(*image.shape[:-2], top + height + bottom, left + width + right).clone()
    padded[..., top : top + height, left : left + width] = image
    return padded


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    """Return (image - mean) / std of images [..., C, H, W]. mean, std: of channels."""
    mean, std = (torch.as_tensor(values, dtype=image.dtype).view(-1, 1, 1) for values in (mean, std))
    return image.sub(mean).div_(std)


def image_processor_class(module: str, name: str) -> Any:
    """Return a class of image processors that Transformers has for torchvision. module: below transformers.models."""
    import transformers.image_processing_backends as backends

    if importlib.util.find_spec("torchvision") is not None:
        return getattr(importlib.import_module(f"transformers.models.{module}"), name)
    with _in_place_of_torchvision() as functions:
        found = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    base: Any = backends
    base.tvF = functions
    base.pil_torch_interpolation_mapping = RESAMPLING
    return found


@contextmanager
def _in_place_of_torchvision() -> Iterator[ModuleType]:
    """Let imports find a module with these functions under the name of torchvision."""
    parts = NAME.split(".")
    modules = {name: ModuleType(name) for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1))}
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    functions: Any = modules[NAME]
    functions.resize, functions.pad, functions.normalize = resize, pad, normalize
    functions.InterpolationMode = InterpolationMode
    sys.modules.update(modules)
    try:
        yield functions
    finally:
        for name in modules:
            del sys.modules[name]

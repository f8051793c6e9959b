"""Arithmetic that several families share. Floats are computed in the order of Transformers, to round as it does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from quire.shared.images.layouts.layout import LayoutError
from quire.shared.model.fields import Fields

MAX_ASPECT_RATIO = 200
_SIZES = "a length, [height, width], or an object with height and width, or with edges"
_KEYS = (
    {"height", "width"},
    {"shortest_edge"},
    {"longest_edge"},
    {"shortest_edge", "longest_edge"},
    {"max_height", "max_width"},
)


def read_size(fields: Fields, name: str, default: Mapping[str, int], is_square: bool = True) -> Mapping[str, int]:
    """Return the lengths of a size by name. is_square: a size that is one length is that of all edges."""
    value: Any = fields.get(name, default)
    if isinstance(value, int):
        value = {"height": value, "width": value} if is_square else {"shortest_edge": value}
    elif isinstance(value, list) and len(value) == 2:
        value = dict(zip(("height", "width"), value, strict=True))
    if not isinstance(value, Mapping) or set(value) not in _KEYS:
        raise fields.fault(name, _SIZES)
    if not all(type(length) is int and length > 0 for length in value.values()):
        raise fields.fault(name, "lengths above 0")
    return value


def read_height_and_width(fields: Fields, name: str, length: int, is_square: bool = True) -> tuple[int, int]:
    """Return height and width of a size that has both. length: the default of both."""
    size = read_size(fields, name, {"height": length, "width": length}, is_square)
    if "height" not in size:
        raise fields.unsupported(name, "height and width")
    return size["height"], size["width"]


def read_frame(images: Fields, size: Mapping[str, int], crop: int) -> tuple[int, int] | int:
    """Return height and width that all images get, or the length of their shorter edge.

    size: the default before cropping. crop: the default of both lengths after cropping; 0: images are not cropped.
    """
    if images.flag("do_center_crop", crop > 0):
        return read_height_and_width(images, "crop_size", crop)
    size = read_size(images, "size", size, images.flag("default_to_square", False))
    if "height" in size:
        return size["height"], size["width"]
    if set(size) != {"shortest_edge"}:
        raise images.unsupported("size", "height and width, or the shortest edge")
    return size["shortest_edge"]


def divide(height: int, width: int, factor: int, least: int, most: int, num_frames: int = 1) -> tuple[int, int]:
    """Return the rows and columns of squares with edges of `factor` pixels into which an image is resized.

    All frames have from `least` to `most` pixels, if the aspect ratio allows it. Raise LayoutError.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise LayoutError(f"one side is more than {MAX_ASPECT_RATIO} times as long as the other")
    rows, columns = round(height / factor), round(width / factor)
    pixels = num_frames * rows * columns * factor**2
    if pixels > most:
        shrink = math.sqrt(num_frames * height * width / most)
        return max(1, math.floor(height / shrink / factor)), max(1, math.floor(width / shrink / factor))
    if pixels < least:
        grow = math.sqrt(least / (num_frames * height * width))
        return math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows, columns


@lru_cache(maxsize=64)
def grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return the (columns, rows) of all grids with `least` to `most` tiles, the smallest first."""
    found = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return tuple(sorted((grid for grid in found if math.prod(grid) >= least), key=math.prod))


def closest_grid(width: int, height: int, tile_pixels: int, choice: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the (columns, rows) whose aspect ratio is the closest to that of an image.

    If two are equally close, the later wins if the image has more than half of its pixels.
    """
    best, least = (1, 1), math.inf
    for columns, rows in choice:
        difference = abs(width / height - columns / rows)
        is_large = width * height > 0.5 * tile_pixels * columns * rows
        if difference < least or (difference == least and is_large):
            best, least = (columns, rows), difference
    return best


def read_resolutions(images: Fields, default: list[list[int]], tile: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the (height, width) of the resolutions into which an image is resized before it is divided into tiles."""
    found = images.get("image_grid_pinpoints", default)
    pairs: list[Any] = found if isinstance(found, list) else []
    is_pairs = all(isinstance(pair, list) and [type(length) for length in pair] == [int, int] for pair in pairs)
    if not pairs or not is_pairs:
        raise images.fault("image_grid_pinpoints", "a list of [height, width]")
    for pair in pairs:
        if pair[0] < tile[0] or pair[1] < tile[1]:
            raise images.unsupported("image_grid_pinpoints", f"at least the size of a tile, {tile[0]} x {tile[1]}")
    return [(height, width) for height, width in pairs]


def padless_features(
    width: int,
    height: int,
    resolutions: list[tuple[int, int]],
    tile: tuple[int, int],
    features: tuple[int, int],
) -> tuple[int, int]:
    """Return the rows and columns of features of a tiled image, without the rows or columns of its padding.

    tile: height and width. features: rows and columns of a tile.
    """
    full_height, full_width = min(resolutions, key=lambda resolution: _waste(width, height, resolution))
    rows, columns = features[0] * (full_height // tile[0]), features[1] * (full_width // tile[1])
    if width / height > columns / rows:
        inside = int(round(height * (columns / width), 7))
        return rows - (rows - inside) // 2 * 2, columns
    inside = int(round(width * (rows / height), 7))
    return rows, columns - (columns - inside) // 2 * 2


def _waste(width: int, height: int, resolution: tuple[int, int]) -> tuple[int, int]:
    """Return a key by which the resolution that keeps the most pixels, and of these the smallest, is the least."""
    full_height, full_width = resolution
    scale = min(full_width / width, full_height / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return -kept, full_width * full_height - kept

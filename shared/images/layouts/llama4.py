"""Llama 4: tiles of the canvas that fits the image best, then the whole image if it has several tiles."""

from __future__ import annotations

import struct

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.sizes import grids, read_height_and_width

# The processor writes these texts, whatever its file names.
BEGIN, WHOLE, PATCH, END = "<|image_start|>", "<|image|>", "<|patch|>", "<|image_end|>"
NEXT_TILE, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"


def read(files: ProcessorFiles) -> Layout:
    files.image_class("Llama4ImageProcessor")
    edge, width = read_height_and_width(files.images, "size", 336)
    if edge != width:
        raise files.images.unsupported("size", "a square")
    most = files.images.integer("max_patches", 16)
    is_large = files.images.flag("resize_to_max_canvas", False)
    shuffle = files.processor.number("pixel_shuffle_ratio", 0.5)
    num_patches = (edge // files.processor.integer("patch_size", 14)) ** 2 // round(1 / shuffle**2)
    tile = PATCH * num_patches

    def write(width: int, height: int) -> str:
        rows, columns = _canvas(width, height, edge, most, is_large)
        row = NEXT_TILE.join([tile] * columns) + NEXT_ROW
        return f"{BEGIN}{row * rows if rows * columns > 1 else ''}{WHOLE}{tile}{END}"

    return files.layout(PATCH, write, placeholder=files.processor_token("image_token", WHOLE))


def _canvas(width: int, height: int, edge: int, most: int, is_large: bool) -> tuple[int, int]:
    """Return the rows and columns of the canvas: the one that needs the least scaling, and of these the smallest.

    is_large: images are scaled up as far as possible.
    """
    # The canvases of a scale differ in size: of two with an equal size, the one with the shorter sides has this scale.
    scales = {
        (rows * columns, rows, columns): min(_float32(columns * edge / width), _float32(rows * edge / height))
        for columns, rows in grids(1, most)
    }
    up = [scale for scale in scales.values() if scale >= 1]
    wanted = (max(up) if is_large else min(up)) if up else max(scales.values())
    _, rows, columns = min(canvas for canvas, scale in scales.items() if scale == wanted)
    return rows, columns


def _float32(value: float) -> float:
    """Round a quotient to float32, in which Transformers compares scales."""
    return float(struct.unpack("f", struct.pack("f", value))[0])

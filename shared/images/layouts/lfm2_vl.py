"""LFM2-VL: the whole image, after the tiles of a grid if it is large. Tiles have their places in front."""

from __future__ import annotations

import math

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.sizes import closest_grid


def read(files: ProcessorFiles) -> Layout:
    files.image_class("Lfm2VlImageProcessor")
    images = files.images
    patch, down = images.integer("encoder_patch_size", 16), images.integer("downsample_factor", 2)
    factor, edge = patch * down, images.integer("tile_size", 512)
    least, most = images.integer("min_image_tokens", 64), images.integer("max_image_tokens", 256)
    tolerance = images.number("max_pixels_tolerance", 2.0)
    is_split = images.flag("do_image_splitting", True)
    bounds = (images.integer("min_tiles", 2), images.integer("max_tiles", 10)) if is_split else (1, 1)
    choice = _grids(*bounds)
    has_whole = images.flag("use_thumbnail", True)
    if not files.processor.flag("use_image_special_tokens", True):
        raise files.processor.unsupported("use_image_special_tokens", "true")
    token = files.token("image_token", "<image>")
    begin, end = files.token("image_start_token", "<|image_start|>"), files.token("image_end_token", "<|image_end|>")
    whole_mark = files.token("image_thumbnail_token", "<|img_thumbnail|>")
    tile = token * math.ceil(edge // patch / down) ** 2

    def write(width: int, height: int) -> str:
        parts = []
        pixels = math.prod(max(patch, round(length / factor) * factor) for length in (height, width))
        if pixels > most * factor**2 * tolerance and bounds != (1, 1):
            columns, rows = closest_grid(width, height, edge**2, choice)
            if rows * columns > 1:
                places = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
                parts = [(f"<|img_row_{row}_col_{column}|>", tile) for row, column in places]
        whole = token * math.prod(_divide(height, width, factor, least, most))
        if not parts or has_whole:
            parts = [*parts, (whole_mark if parts else "", whole)]
        return f"{begin}{''.join(mark + tokens for mark, tokens in parts)}{end}"

    return files.layout(token, write)


def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Return the (columns, rows) of grids in the order of Transformers, where that of a set decides between equals."""
    counts = range(least, most + 1)
    found = {(c, r) for n in counts for c in range(1, n + 1) for r in range(1, n + 1) if least <= c * r <= most}
    return sorted(found, key=math.prod)


def _divide(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of `least` to `most` squares with edges of `factor` pixels."""
    rows, columns = max(1, round(height / factor)), max(1, round(width / factor))
    if rows * columns > most:
        shrink = math.sqrt(height * width / (most * factor**2))
        return max(1, math.floor(height / shrink / factor)), max(1, math.floor(width / shrink / factor))
    if rows * columns < least:
        grow = math.sqrt(least * factor**2 / (height * width))
        return math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows, columns

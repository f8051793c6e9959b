"""Idefics 3 and SmolVLM: rows of tiles with their places in front, then the whole image."""

from __future__ import annotations

import math

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout, LayoutError
from quire.shared.images.layouts.sizes import read_size

# The longest edge of a resized image.
MOST = 4096


def read(files: ProcessorFiles) -> Layout:
    """Return the layout of Idefics 3, whose tokens have fixed texts."""
    return _layout(files, "<fake_token_around_image>", "<image>", "<global-img>")


def read_smolvlm(files: ProcessorFiles) -> Layout:
    """Return the layout of SmolVLM, whose tokenizer may name the tokens."""
    border = files.token("fake_image_token", "<fake_token_around_image>")
    return _layout(
        files, border, files.token("image_token", "<image>"), files.token("global_image_token", "<global-img>")
    )


def _layout(files: ProcessorFiles, border: str, token: str, whole: str) -> Layout:
    files.image_class("Idefics3ImageProcessor", "SmolVLMImageProcessor")
    is_split = files.images.flag("do_image_splitting", True)
    size = read_size(files.images, "size", {"longest_edge": 4 * 364})
    if "longest_edge" not in size and "height" not in size:
        raise files.images.unsupported("size", "longest_edge, or height and width")
    tile_size = read_size(files.images, "max_image_size", {"longest_edge": 364})
    if "longest_edge" not in tile_size:
        raise files.images.unsupported("max_image_size", "longest_edge")
    edge = tile_size["longest_edge"]
    tokens = token * files.processor.integer("image_seq_len", 169)

    def write(width: int, height: int) -> str:
        if "longest_edge" in size:
            width, height = _resized(width, height, size["longest_edge"])
        else:
            width, height = size["width"], size["height"]
        rows, columns = _divide(width, height, edge) if is_split else (1, 1)
        all_of_it = f"{border}{whole}{tokens}{border}"
        if rows * columns == 1:
            return all_of_it
        tiles = (
            "".join(f"{border}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return f"{''.join(tiles)}\n{all_of_it}"

    return files.layout(token, write)


def _resized(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the width and height of an image with its longest edge resized, first to `longest`, then to MOST."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MOST:
        width, height = MOST, int(MOST / ratio)
    elif height > width and height > MOST:
        width, height = int(MOST * ratio), MOST
    return max(width, 1), max(height, 1)


def _divide(width: int, height: int, edge: int) -> tuple[int, int]:
    """Return the rows and columns of tiles."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / edge)
        rows = math.ceil(int(columns * edge / ratio) / edge)
    else:
        rows = math.ceil(height / edge)
        columns = math.ceil(int(rows * edge * ratio) / edge)
    if not rows or not columns:
        raise LayoutError("resized, it has no pixels")
    return rows, columns

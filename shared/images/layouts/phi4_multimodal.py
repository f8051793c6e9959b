"""Phi-4-multimodal: the whole image, then the rows of its tiles without padding, with a token for each row."""

from __future__ import annotations

import math

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout, LayoutError
from quire.shared.images.layouts.sizes import closest_grid, grids, read_height_and_width

# The whole image has 16 rows of 16 tokens, a token for each row, and one that separates it from the tiles.
NUM_WHOLE = 16 * 16 + 16 + 1
# The shortest side of a resized image.
LEAST = 10


def read(files: ProcessorFiles) -> Layout:
    files.image_class("Phi4MultimodalImageProcessor")
    edge, width = read_height_and_width(files.images, "size", 448)
    if edge != width:
        raise files.images.unsupported("size", "a square")
    patch = files.images.integer("patch_size", 14, maximum=edge)
    most = files.images.integer("dynamic_hd", 36)
    token = files.token("image_token")

    def write(width: int, height: int) -> str:
        columns, rows = math.ceil(width / edge), math.ceil(height / edge)
        if columns * rows > most:
            columns, rows = closest_grid(width, height, edge**2, grids(1, most))
        across, down = columns * edge / width, rows * edge / height
        inside_width, inside_height = columns * edge, rows * edge
        if across < down:
            inside_height = int(height * across)
        else:
            inside_width = int(width * down)
        if min(inside_width, inside_height) < LEAST:
            raise LayoutError(f"resized, one side has less than {LEAST} pixels")
        features = [
            _features(tiles, tiles * edge - inside, edge, patch)
            for tiles, inside in ((rows, inside_height), (columns, inside_width))
        ]
        return token * (NUM_WHOLE + features[0] * (features[1] + 1))

    return files.layout(token, write)


def _features(num_tiles: int, padding: int, edge: int, patch: int) -> int:
    """Return the rows or columns of features outside of the padding. A feature stands for two patches of a tile."""
    num_patches = edge // patch
    inside = num_tiles * num_patches - padding // patch
    return sum(tile * num_patches + place < inside for tile in range(num_tiles) for place in range(0, num_patches, 2))

"""Cohere2 Vision (Command A Vision): tiles of the grid that fits the image best, then the whole image."""

from __future__ import annotations

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.sizes import grids, read_height_and_width


def read(files: ProcessorFiles) -> Layout:
    files.image_class("Cohere2VisionImageProcessor")
    edge, _ = read_height_and_width(files.images, "size", 512)
    most = files.images.integer("max_patches", 12) if files.images.flag("crop_to_patches", True) else 1
    token = files.token("image_token")
    begin, end, tile_end = (files.token(name) for name in ("boi_token", "eoi_token", "img_line_break_token"))
    tile = token * files.images.integer("patch_size", 16) ** 2 + tile_end

    def write(width: int, height: int) -> str:
        # The grid that needs the least scaling up, or down if none is as large as the image; of equals, the first.
        scales = {grid: min(grid[0] * edge / width, grid[1] * edge / height) for grid in grids(1, most)}
        up = [scale for scale in scales.values() if scale >= 1]
        wanted = min(up) if up else max(scales.values())
        columns, rows = next(grid for grid, scale in scales.items() if scale == wanted)
        return f"{begin}{tile * (rows * columns + (rows * columns > 1))}{end}"

    return files.layout(token, write)

"""Aya Vision: the tiles of InternVL, each with its number in front."""

from __future__ import annotations

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.internvl import Tiles
from quire.shared.images.layouts.layout import Layout


def read(files: ProcessorFiles) -> Layout:
    tiles = Tiles(files)
    patch = files.processor.integer("patch_size", 28) * files.processor.integer("downsample_factor", 1)
    token = files.processor_token("img_patch_token", "<|IMG_PATCH|>")
    tile = token * (files.processor.integer("img_size", 364) // patch) ** 2
    begin = files.processor_token("start_of_img_token", "<|START_OF_IMG|>")
    end = files.processor_token("end_of_img_token", "<|END_OF_IMG|>")
    name = files.processor_token("tile_token", "TILE")
    name_of_all = files.processor_token("tile_global_token", "TILE_GLOBAL")

    def write(width: int, height: int) -> str:
        parts = (f"{name}_{number}{tile}" for number in range(1, tiles.count(width, height)))
        return f"{begin}{''.join(parts)}{name_of_all}{tile}{end}"

    return files.layout(token, write, placeholder=files.processor_token("image_token", "<image>"))

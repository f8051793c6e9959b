"""Kimi K2.5: a token for each square of patches. Images are scaled down to the limits, never up."""

from __future__ import annotations

import math

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.sizes import read_size


def read(files: ProcessorFiles) -> Layout:
    files.image_class("Kimi_K25ImageProcessor")
    images = files.images
    patch = images.integer("patch_size", 14)
    edge = patch * images.integer("merge_size", 2)
    most = images.integer("max_patches", 16384)
    size = read_size(images, "size", {"max_height": 512, "max_width": 512})
    if "max_height" not in size or size["max_height"] != size["max_width"]:
        raise images.unsupported("size", "max_height and max_width that are the same")
    longest = size["max_height"] * patch
    token = files.token("image_token", "<|media_pad|>")

    def write(width: int, height: int) -> str:
        num_patches = max(1, height // patch) * max(1, width // patch)
        scale = min(1.0, math.sqrt(most / num_patches), longest / height, longest / width)
        lengths = (min(max(1, int(length * scale)), longest) for length in (height, width))
        return token * math.prod(math.ceil(length / edge) for length in lengths)

    return files.layout(token, write)

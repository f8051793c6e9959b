"""Pixtral and Mistral 3: rows of tokens, one for each square of patches, with a token after each row."""

from __future__ import annotations

import math

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout, LayoutError
from quire.shared.images.layouts.sizes import read_size


def read(files: ProcessorFiles) -> Layout:
    files.image_class("PixtralImageProcessor")
    images = files.images
    if images.flag("do_center_crop", False):
        raise images.unsupported("do_center_crop", "false")
    size = read_size(images, "size", {"longest_edge": 1024})
    if "longest_edge" in size:
        most_high = most_wide = size["longest_edge"]
    elif "height" in size:
        most_high, most_wide = size["height"], size["width"]
    else:
        raise images.unsupported("size", "longest_edge, or height and width")
    edge = files.processor.integer("patch_size", 16) * files.processor.integer("spatial_merge_size", 1)
    token = files.processor_token("image_token", "[IMG]")
    row_end = files.processor_token("image_break_token", "[IMG_BREAK]")
    end = files.processor_token("image_end_token", "[IMG_END]")

    def write(width: int, height: int) -> str:
        ratio = max(height / most_high, width / most_wide)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        if not width or not height:
            raise LayoutError("resized, it has no pixels")
        return row_end.join([token * math.ceil(width / edge)] * math.ceil(height / edge)) + end

    return files.layout(token, write)

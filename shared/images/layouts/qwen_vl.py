"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: a token for each square of patches, in the aspect ratio of the image."""

from __future__ import annotations

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.sizes import divide, read_size

# The default numbers of pixels of an image.
LEAST, MOST = 56 * 56, 28 * 28 * 1280


def read(files: ProcessorFiles) -> Layout:
    files.image_class("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
    images = files.images
    factor = images.integer("patch_size", 14) * images.integer("merge_size", 2)
    # The edges are numbers of pixels. Older folders name them so.
    old = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    edges = {edge: images.integer(name) for edge, name in old.items() if images.get(name) is not None}
    if len(edges) < len(old):
        edges = {**read_size(images, "size", {"shortest_edge": LEAST, "longest_edge": MOST}, False), **edges}
    if edges.keys() != old.keys():
        raise images.unsupported("size", "shortest_edge and longest_edge")
    token = files.token("image_token", "<|image_pad|>")

    def grid(width: int, height: int) -> tuple[int, int]:
        return divide(height, width, factor, edges["shortest_edge"], edges["longest_edge"])

    return files.grid_layout(token, grid)

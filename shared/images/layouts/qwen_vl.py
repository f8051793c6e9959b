"""A token for each square of patches, in the aspect ratio of the image: Qwen2-VL to Qwen3.5, and others like them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.sizes import divide, read_size

CLASSES = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
# The default numbers of pixels of an image, at least and at most.
PIXELS = (56 * 56, 28 * 28 * 1280)


def read(files: ProcessorFiles) -> Layout:
    return files.grid_layout(files.token("image_token", "<|image_pad|>"), _grid(files, CLASSES, *PIXELS))


def read_dots3_note(files: ProcessorFiles) -> Layout:
    """Return the layout of dots3, whose image token has a fixed text."""
    return files.grid_layout("<|imgpad|>", _grid(files, CLASSES, *PIXELS))


def read_minimax_m3_vl(files: ProcessorFiles) -> Layout:
    """Return the layout of MiniMax M3, with fixed tokens around each image. Its template writes the image token."""
    grid = _grid(files, ("MiniMaxM3VLImageProcessor",), 4 * 28 * 28, 451_584)
    layout = files.grid_layout("]<]image[>[", grid)
    return replace(layout, write=lambda *size: f"]<]start of image[>[{layout.write(*size)}]<]end of image[>[")


def _grid(
    files: ProcessorFiles, classes: tuple[str, ...], least: int, most: int
) -> Callable[[int, int], tuple[int, int]]:
    """Return the rows and columns of tokens by (width, height). least, most: default numbers of pixels."""
    files.image_class(*classes)
    images = files.images
    factor = images.integer("patch_size", 14) * images.integer("merge_size", 2)
    # The edges are numbers of pixels. Older folders name them so.
    old = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    edges = {edge: images.integer(name) for edge, name in old.items() if images.get(name) is not None}
    if len(edges) < len(old):
        edges = {**read_size(images, "size", {"shortest_edge": least, "longest_edge": most}, False), **edges}
    if edges.keys() != old.keys():
        raise images.unsupported("size", "shortest_edge and longest_edge")
    return lambda width, height: divide(height, width, factor, edges["shortest_edge"], edges["longest_edge"])

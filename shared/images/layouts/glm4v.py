"""GLM-4.1V, GLM-4.5V and GLM-4.6V: a token for each square of patches. The limits count an image as several frames."""

from __future__ import annotations

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.sizes import divide, read_size

# The default numbers of pixels of an image, with all its frames.
EDGES = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}


def read(files: ProcessorFiles) -> Layout:
    files.image_class("Glm4vImageProcessor", "Glm46VImageProcessor")
    images = files.images
    factor = images.integer("patch_size", 14) * images.integer("merge_size", 2)
    num_frames = images.integer("temporal_patch_size", 2)
    edges = read_size(images, "size", EDGES, False)
    if edges.keys() != EDGES.keys():
        raise images.unsupported("size", "shortest_edge and longest_edge")
    token = files.token("image_token", "<|image|>")

    def grid(width: int, height: int) -> tuple[int, int]:
        if min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        limits = edges["shortest_edge"], edges["longest_edge"]
        return divide(height, width, factor, *limits, num_frames)

    return files.grid_layout(token, grid)

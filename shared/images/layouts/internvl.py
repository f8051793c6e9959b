"""InternVL: tiles in the grid closest to the aspect ratio of the image, then the whole image if there are several."""

from __future__ import annotations

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.sizes import closest_grid, grids, read_height_and_width


class Tiles:
    """The tiles of the image processor GotOcr2."""

    def __init__(self, files: ProcessorFiles) -> None:
        files.image_class("GotOcr2ImageProcessor")
        height, width = read_height_and_width(files.images, "size", 384)
        self._pixels = height * width
        self._least, self._most = files.images.integer("min_patches", 1), files.images.integer("max_patches", 12)

    def count(self, width: int, height: int) -> int:
        """Return the number of tiles of an image, with the whole image."""
        columns, rows = closest_grid(width, height, self._pixels, grids(self._least, self._most))
        return columns * rows + 1 if columns * rows > 1 else 1


def read(files: ProcessorFiles) -> Layout:
    tiles = Tiles(files)
    begin, token, end = (files.token(f"{name}_image_token") for name in ("start", "context", "end"))
    tile = token * files.processor.integer("image_seq_length", 256)
    return files.layout(token, lambda width, height: f"{begin}{tile * tiles.count(width, height)}{end}")

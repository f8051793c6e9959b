"""LLaVA-NeXT: the features of the whole image, then those of its tiles without padding, with a token for each row."""

from __future__ import annotations

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.llava import other_features
from quire.shared.images.layouts.sizes import padless_features, read_frame, read_resolutions

RESOLUTIONS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def read(files: ProcessorFiles) -> Layout:
    files.image_class("LlavaNextImageProcessor")
    frame = read_frame(files.images, {"shortest_edge": 224}, 224)
    tile = (frame, frame) if isinstance(frame, int) else frame
    resolutions = read_resolutions(files.images, RESOLUTIONS, tile)
    patch = files.processor.integer("patch_size")
    features = tile[0] // patch, tile[1] // patch
    if not all(features):
        raise files.processor.unsupported("patch_size", f"at most the size of a tile, {tile[0]} x {tile[1]}")
    others = other_features(files)
    token = files.token("image_token", files.processor_token("image_token", "<image>"))

    def write(width: int, height: int) -> str:
        rows, columns = padless_features(width, height, resolutions, tile, features)
        return token * (features[0] * features[1] + rows * (columns + 1) + others)

    return files.layout(token, write)

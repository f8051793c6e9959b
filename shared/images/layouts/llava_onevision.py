"""LLaVA-OneVision: as LLaVA-NeXT, but tiles with more features than a limit are scaled down."""

from __future__ import annotations

import math
import re

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout
from quire.shared.images.layouts.llava import other_features
from quire.shared.images.layouts.sizes import padless_features, read_frame, read_resolutions

RESOLUTIONS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]


def read(files: ProcessorFiles) -> Layout:
    files.image_class("LlavaOnevisionImageProcessor")
    frame = read_frame(files.images, {"height": 384, "width": 384}, 0)
    tile = (frame, frame) if isinstance(frame, int) else frame
    resolutions = read_resolutions(files.images, RESOLUTIONS, tile)
    num_features = files.processor.integer("num_image_tokens")
    edge = int(math.sqrt(num_features))
    limit = re.fullmatch(r"anyres_max_(\d+)", str(files.processor.get("vision_aspect_ratio", "anyres_max_9")))
    if limit is None or not int(limit[1]):
        raise files.processor.unsupported("vision_aspect_ratio", "anyres_max_N with N above 0")
    most = int(limit[1]) * edge**2
    others = other_features(files)
    token = files.token("image_token", files.processor_token("image_token", "<image>"))

    def write(width: int, height: int) -> str:
        rows, columns = padless_features(width, height, resolutions, tile, (edge, edge))
        ratio = math.sqrt(rows * columns / most)
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return token * (num_features + rows * (columns + 1) + others)

    return files.layout(token, write)

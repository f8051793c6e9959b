"""Gemma 4: a token for each pool of patches. An image has the most that its aspect ratio and the limit allow."""

from __future__ import annotations

import math

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout, LayoutError

# The limits for which the model is trained.
LIMITS = (70, 140, 280, 560, 1120)


def read(files: ProcessorFiles) -> Layout:
    files.image_class("Gemma4ImageProcessor")
    limit = files.images.integer("max_soft_tokens", 280)
    if limit not in LIMITS:
        raise files.images.unsupported("max_soft_tokens", f"one of {', '.join(map(str, LIMITS))}")
    pool = files.images.integer("pooling_kernel_size", 3)
    edge = pool * files.images.integer("patch_size", 16)
    begin, token, end = (files.token(name) for name in ("boi_token", "image_token", "eoi_token"))

    def write(width: int, height: int) -> str:
        return f"{begin}{token * math.prod(_divide(height, width, edge, limit))}{end}"

    return files.layout(token, write)


def _divide(height: int, width: int, edge: int, limit: int) -> tuple[int, int]:
    """Return the rows and columns of pools, which have `edge` pixels on each side."""
    factor = math.sqrt(limit * edge**2 / (height * width))
    rows, columns = math.floor(factor * height / edge), math.floor(factor * width / edge)
    if not rows and not columns:
        raise LayoutError("it is smaller than a token")
    if not rows:
        rows, columns = 1, min(math.floor(width / height), limit)
    elif not columns:
        rows, columns = min(math.floor(height / width), limit), 1
    if rows * columns > limit:
        raise LayoutError(f"it has more than {limit} tokens")
    return rows, columns

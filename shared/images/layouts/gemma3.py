"""Gemma 3: the same number of tokens for each image. Crops (pan and scan) are made on request only, and not here."""

from __future__ import annotations

from quire.shared.images.layouts.files import ProcessorFiles
from quire.shared.images.layouts.layout import Layout


def read(files: ProcessorFiles) -> Layout:
    files.image_class("Gemma3ImageProcessor")
    begin, token, end = (files.token(name) for name in ("boi_token", "image_token", "eoi_token"))
    text = f"\n\n{begin}{token * files.processor.integer('image_seq_length', 256)}{end}\n\n"
    return files.layout(token, lambda width, height: text, placeholder=begin)

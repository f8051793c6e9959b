"""Counters of the images of prompts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ImageCounters:
    """Counters since the start of the process, in images, and the size of the cache of embeddings."""

    computed: int = 0
    found: int = 0  # in the cache
    tower_s: float = 0.0
    cached_bytes: int = 0

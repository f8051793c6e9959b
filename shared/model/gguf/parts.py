"""The names of the files of a split model: `NAME-00001-of-00003.gguf` and so on, as llama-gguf-split writes them."""

from __future__ import annotations

import re
from pathlib import Path

MAX_PARTS = 1000
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)", re.ASCII | re.IGNORECASE)


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of the model that a file belongs to by its name; of a whole model the path alone.

    The files need not exist.
    """
    match = _PART.fullmatch(path.name)
    count = int(match["count"]) if match else 0
    if match is None or not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        return [path]
    return [path.with_name(f"{match['stem']}-{at:05}-of-{count:05}{match['end']}") for at in range(1, count + 1)]


def model_stem(path: Path) -> str:
    """Return the name of a model without the number of a part and without the suffix."""
    match = _PART.fullmatch(path.name)
    return match["stem"] if match else path.stem

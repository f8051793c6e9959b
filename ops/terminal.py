"""Styles of text in terminals. This module alone decides whether output may have them."""

from __future__ import annotations

import os
import sys
from typing import TextIO

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


def has_styles(stream: TextIO) -> bool:
    """Return whether styled text may be written: to a terminal, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """Return `text` in a style if the stream may have it. The default stream is standard output."""
    return f"\x1b[{style}m{text}\x1b[0m" if has_styles(stream or sys.stdout) else text

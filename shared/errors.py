"""The error with which every process refuses to start."""

from __future__ import annotations


class StartError(RuntimeError):
    """A process cannot start. The text is one line: the setting or file, its value, the cause and the remedy."""

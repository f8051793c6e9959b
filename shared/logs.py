"""Logs: one line per event on standard error, the same shape in every process.

    2026-05-04 12:00:01.234 INFO  worker  message

The time is local with milliseconds. A message that spans lines is kept on one, so that `grep` finds all of it; only a
traceback follows on lines of its own.
"""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")

_ESCAPES = {ord("\n"): "\\n", ord("\r"): "\\r"}


class LineFormatter(logging.Formatter):
    """Renders a record as one line that names its process."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = self.formatTime(record, "%Y-%m-%d %H:%M:%S")
        message = record.getMessage().translate(_ESCAPES)
        line = f"{when}.{int(record.msecs):03d} {record.levelname:<7} {self._process}  {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def setup_logging(process: str, level: str = "info") -> None:
    """Send all logs of this process to standard error. `level` is one of LEVELS. A second call replaces the set-up."""
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries that log every request or step at INFO would drown what Quire says.
    for name in ("aiohttp.access", "asyncio", "urllib3", "httpx", "filelock", "huggingface_hub"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)

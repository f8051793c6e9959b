"""Logs: one line per event on standard error, in the same format in every process.

    2026-05-04 12:00:01.234 INFO  worker  message
    {"ts": "2026-05-04T10:00:01.234Z", "level": "info", "logger": "quire.worker", "msg": "message", "worker": "w1"}

The time of a text line is local, that of a JSON line is UTC. A message with line breaks is written on one line, so that
`grep` finds all of it. A traceback follows a text line on separate lines, and is the field `exception` of a JSON line.

A message never contains input of clients. A traceback could quote it in the text of an exception: with `hides_errors`
tracebacks have only the places and types of exceptions.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

# Fields of a JSON line that a message may have in addition to its text, as `extra`.
FIELDS = (
    "request_id",
    "client_request_id",
    "user_hash",
    "trace_id",
    "method",
    "path",
    "status",
    "outcome",
    "ttft_ms",
    "duration_ms",
    "prompt_tokens",
    "tokens",
    "prompt",
)

_ESCAPES = {ord("\n"): "\\n", ord("\r"): "\\r"}


class LineFormatter(logging.Formatter):
    """Renders a record as one line that names its process."""

    def __init__(self, process: str, hides_errors: bool = False) -> None:
        super().__init__()
        self._process = process
        self._hides_errors = hides_errors

    def format(self, record: logging.LogRecord) -> str:
        when = self.formatTime(record, "%Y-%m-%d %H:%M:%S")
        message = record.getMessage().translate(_ESCAPES)
        line = f"{when}.{int(record.msecs):03d} {record.levelname:<7} {self._process}  {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line

    def formatException(self, ei: Any) -> str:
        return places(ei[1]) if self._hides_errors and ei[1] is not None else super().formatException(ei)


class JsonFormatter(LineFormatter):
    """Renders a record as one JSON object, with the process' names (`worker`, `gateway`) and its FIELDS."""

    def __init__(self, names: dict[str, str], hides_errors: bool = False) -> None:
        super().__init__("", hides_errors)
        self._names = names

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "ts": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **self._names,
        }
        line |= {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def places(error: BaseException) -> str:
    """Format a traceback without the texts of its exceptions, which may quote input of a client."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        kind = type(current)
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"{frames}{kind.__module__}.{kind.__qualname__}: (text withheld: it may quote a prompt)")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nwhich led to\n".join(reversed(parts))


def setup_logging(
    process: str, level: str = "info", form: str = "text", *, hides_errors: bool = False, **names: str
) -> None:
    """Send all logs of this process to standard error. A second call replaces the set-up.

    `level` is one of LEVELS, `form` one of FORMATS; `names` are fields of every JSON line.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}")
    if form not in FORMATS:
        raise ValueError(f"form must be one of {', '.join(FORMATS)}, not {form!r}")
    handler = logging.StreamHandler(sys.stderr)
    is_json = form == "json"
    handler.setFormatter(JsonFormatter(names, hides_errors) if is_json else LineFormatter(process, hides_errors))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # The libraries below log every request or step at INFO and would drown the log of Quire.
    for name in ("aiohttp.access", "asyncio", "urllib3", "httpx", "filelock", "huggingface_hub"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)


def give_up(prog: str, error: object) -> None:
    """Write the last line of a process that cannot go on: a sentence, or a record if the log is JSON."""
    message = f"{prog}: {' '.join(str(error).split())}"
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logging.getLogger(prog.replace(" ", ".")).critical("%s", message)
    else:
        print(message, file=sys.stderr)

"""`quire batch`: submits files of calls, follows them, stops them, and fetches their output."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from quire.ops.cli.batch_client import BatchClient
from quire.ops.cli.settings import BatchCommandSettings
from quire.shared.config.command_line import CommandError
from quire.shared.process.interrupts import raise_at_ctrl_c

ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.5
# Seconds between two lines of progress where it is no terminal.
LINE_S = 10.0
BAR = 30
# Batches that `list` prints.
LISTED = 20
MAX_FIRST_LINE = 64 * 1024 * 1024


def batch(settings: BatchCommandSettings, environ: Mapping[str, str]) -> int:
    """Carry out an action. Return 0, or 1 for a batch that did not complete. Raise CommandError."""
    raise_at_ctrl_c()
    client = BatchClient(settings.url, settings.api_key)
    action = settings.action
    if action == "list":
        for record in client.all(LISTED):
            print(json.dumps(record) if settings.json else summary(record))
        return 0
    if action == "submit":
        return _submit(client, settings)
    if action == "cancel":
        record = client.cancel(_id(settings))
    else:
        record = client.show(_id(settings))
        if settings.wait:
            record = follow(client, record, sys.stderr)
    if action == "fetch":
        return _fetch(client, settings, record)
    print(json.dumps(record) if settings.json else summary(record))
    return _report(record)


def _submit(client: BatchClient, settings: BatchCommandSettings) -> int:
    if not settings.file:
        raise CommandError("--file is missing: give the JSONL file with the calls")
    path = Path(settings.file)
    endpoint = settings.endpoint or first_url(path)
    bar = ProgressLine(sys.stderr)
    file_id = client.upload(path, lambda sent, size: bar.show(f"uploading {_share(sent, size)}"))
    bar.end()
    record = client.create(file_id, endpoint, settings.completion_window, _metadata(settings.metadata))
    print(json.dumps(record) if settings.json and not settings.wait else record["id"], flush=True)
    if not settings.wait:
        return 0
    record = follow(client, record, sys.stderr)
    if settings.json:
        print(json.dumps(record))
    return _report(record)


def _fetch(client: BatchClient, settings: BatchCommandSettings, record: dict[str, Any]) -> int:
    """Write output and errors of a batch that has ended to files, or the output to standard output."""
    if record["status"] not in ENDED:
        raise CommandError(f"{record['id']} has not ended ({record['status']}); wait, or pass --wait")
    for file_id, path in ((record["output_file_id"], settings.output), (record["error_file_id"], settings.errors)):
        if path and path != "-":
            _write(client, file_id, Path(path))
        elif file_id and path:
            client.download(file_id, sys.stdout.buffer)
    if record["error_file_id"] and not settings.errors:
        print(f"{record['request_counts']['failed']} lines have failed; --errors FILE fetches them", file=sys.stderr)
    return _report(record)


def _write(client: BatchClient, file_id: str | None, path: Path) -> None:
    """Write a file under a name of its own, and rename it when it is complete. Without an id the file is empty."""
    draft = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        try:
            with draft.open("wb") as to:
                size = client.download(file_id, to) if file_id else 0
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}; give another file") from error
    print(f"{path}: {size} bytes", file=sys.stderr)


def _report(record: dict[str, Any]) -> int:
    """Print the errors of a validation. Return the exit code for the status of a batch."""
    for error in (record.get("errors") or {}).get("data") or ():
        place = f"line {error['line']}: " if error.get("line") else ""
        print(f"{place}{error['message']}", file=sys.stderr)
    return 1 if record["status"] in ("failed", "expired") else 0


def follow(client: BatchClient, record: dict[str, Any], to: TextIO) -> dict[str, Any]:
    """Show the progress of a batch until it has ended, and return it then."""
    bar, started, before = ProgressLine(to), time.monotonic(), record["request_counts"]["completed"]
    while True:
        counts = record["request_counts"]
        done = counts["completed"] + counts["failed"]
        rate = (done - before) / max(0.001, time.monotonic() - started)
        text = f"{record['status']} {_share(done, counts['total'])}"
        if counts["failed"]:
            text += f", {counts['failed']} failed"
        if rate > 0 and record["status"] == "in_progress":
            text += f", {rate:.1f} lines/s, {_time((counts['total'] - done) / rate)} left"
        is_over = record["status"] in ENDED
        bar.show(text, is_last=is_over)
        if is_over:
            bar.end()
            return record
        time.sleep(POLL_S)
        record = client.show(record["id"])


class ProgressLine:
    """One line of a terminal that is written again and again; elsewhere a line every LINE_S."""

    def __init__(self, to: TextIO) -> None:
        self._to = to
        self._is_terminal = to.isatty()
        self._width = 0
        self._next_at = 0.0

    def show(self, text: str, *, is_last: bool = False) -> None:
        """Show the progress now."""
        if self._is_terminal:
            text = text[: shutil.get_terminal_size((80, 24)).columns - 1]
            self._to.write(f"\r{text:<{self._width}}")
            self._width = len(text)
            self._to.flush()
        elif is_last or time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + LINE_S
            print(text, file=self._to, flush=True)

    def end(self) -> None:
        """Go to the next line."""
        if self._is_terminal and self._width:
            self._to.write("\n")
            self._to.flush()
            self._width = 0


def summary(record: dict[str, Any]) -> str:
    """Return a batch as one line."""
    counts = record["request_counts"]
    done = f"{counts['completed']} of {counts['total']} lines completed, {counts['failed']} failed"
    files = "".join(
        f", {name} {record[field]}"
        for name, field in (("output", "output_file_id"), ("errors", "error_file_id"))
        if record[field]
    )
    return f"{record['id']}  {record['status']}  {record['endpoint']}  {done}{files}"


def first_url(path: Path) -> str:
    """Return the `url` of the first line of a file: the endpoint of the batch. Raise CommandError."""
    try:
        with path.open("rb") as file:
            url = json.loads(file.readline(MAX_FIRST_LINE))["url"]
    except OSError as error:
        raise CommandError(f"--file {path} cannot be read: {error.strerror or error}; give a JSONL file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"--file {path}: the first line is no JSON object with a `url`; correct it, or give --endpoint"
        ) from error
    return str(url)


def _metadata(text: str) -> dict[str, str]:
    """Read `KEY=VALUE`, separated by commas. Raise CommandError."""
    metadata = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise CommandError(f"--metadata: {part!r} is not KEY=VALUE")
        metadata[key] = value
    return metadata


def _id(settings: BatchCommandSettings) -> str:
    if not settings.id:
        raise CommandError("--id is missing: give one that `submit` or `list` prints")
    return settings.id


def _share(done: int, total: int) -> str:
    """Return a bar with numbers: `[#####.....] 50% 5/10`."""
    share = done / total if total else 0.0
    filled = round(BAR * share)
    return f"[{'#' * filled}{'.' * (BAR - filled)}] {100 * share:.0f}% {done}/{total}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"

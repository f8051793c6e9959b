"""A log line says when, how grave, who and what, and stays one line."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys

import pytest

from quire.shared.telemetry.logs import JsonFormatter, LineFormatter, setup_logging


def test_a_record_is_one_line_with_time_level_process_and_message() -> None:
    record = logging.LogRecord("n", logging.WARNING, "f", 1, "two\nlines %d", (3,), None)
    line = LineFormatter("worker w1").format(record)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING worker w1  two\\nlines 3", line)


def test_logs_go_to_standard_error_from_the_level_on() -> None:
    program = (
        "import logging; from quire.shared.telemetry.logs import setup_logging; setup_logging('p', 'error'); "
        "setup_logging('p', 'info'); "
        "logging.debug('hidden'); logging.info('shown'); logging.getLogger('httpx').info('noise')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert [line.split("  ")[-1] for line in done.stderr.splitlines()] == ["shown"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        setup_logging("p", "loud")


def test_json_is_one_object_per_line_with_names_and_fields() -> None:
    record = logging.LogRecord("worker.x", logging.WARNING, "f", 1, "two\nlines %s\u2028", ("ü",), None)
    record.created = 1777890001.2345
    record.request_id, record.status, record.unknown = "r1", 200, "x"
    line = JsonFormatter({"worker": "w1"}).format(record)
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line) == {
        "ts": "2026-05-04T10:20:01.234Z",
        "level": "warning",
        "logger": "worker.x",
        "msg": "two\nlines ü\u2028",
        "worker": "w1",
        "request_id": "r1",
        "status": 200,
    }


@pytest.mark.parametrize("formatter", [LineFormatter("p", hides_errors=True), JsonFormatter({}, hides_errors=True)])
def test_a_traceback_does_not_quote(formatter: LineFormatter) -> None:
    said = "hu" + "sh"  # a traceback has the lines of the source
    try:
        try:
            {}[said]
        except KeyError as error:
            raise ValueError(said) from error
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "it failed", (), sys.exc_info())
    text = formatter.format(record)
    assert "builtins.KeyError" in text
    assert "builtins.ValueError" in text
    assert text.count("test_logs.py") == 2
    assert "hush" not in text


def test_an_unhidden_traceback_has_its_texts() -> None:
    try:
        raise ValueError("no room")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "it failed", (), sys.exc_info())
    assert "ValueError: no room" in LineFormatter("p").format(record)
    assert "ValueError: no room" in json.loads(JsonFormatter({}).format(record))["exception"]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="text, json"):
        setup_logging("p", "info", "xml")


def test_the_last_line_is_json_where_the_log_is() -> None:
    for form in ("text", "json"):
        program = (
            "from quire.shared.telemetry.logs import give_up, setup_logging; "
            f"setup_logging('p', 'info', '{form}', gateway='g'); give_up('quire gateway', 'no\\nroom')"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        if form == "text":
            assert done.stderr == "quire gateway: no room\n"
        else:
            said = json.loads(done.stderr)
            assert (said["level"], said["msg"], said["gateway"]) == ("critical", "quire gateway: no room", "g")

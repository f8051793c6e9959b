"""A log line says when, how grave, who and what, and stays one line."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

from shared.logs import LineFormatter, setup_logging


def test_a_record_is_one_line_with_time_level_process_and_message() -> None:
    record = logging.LogRecord("n", logging.WARNING, "f", 1, "two\nlines %d", (3,), None)
    line = LineFormatter("worker w1").format(record)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING worker w1  two\\nlines 3", line)


def test_logs_go_to_standard_error_from_the_level_on() -> None:
    program = (
        "import logging; from shared.logs import setup_logging; setup_logging('p', 'error'); "
        "setup_logging('p', 'info'); "
        "logging.debug('hidden'); logging.info('shown'); logging.getLogger('httpx').info('noise')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert [line.split("  ")[-1] for line in done.stderr.splitlines()] == ["shown"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        setup_logging("p", "loud")

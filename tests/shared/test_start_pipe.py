"""The pipe by which a child of `quire serve` says that it is ready."""

from __future__ import annotations

import os

import pytest

from quire.shared.start_pipe import PIPE, READY, report_ready


def test_it_says_once_that_the_process_is_ready_and_closes_the_pipe() -> None:
    reading, writing = os.pipe()
    environ = {PIPE: str(writing), "OTHER": "1"}
    report_ready(environ)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == f"{READY}\n", "the writing end is closed, so that the reader sees the end"
    assert environ == {"OTHER": "1"}, "processes that this one starts must not write to the pipe"
    report_ready(environ)


@pytest.mark.parametrize("descriptor", ["", "x", "-1", "9999"])
def test_a_process_without_a_pipe_says_nothing(descriptor: str) -> None:
    report_ready({PIPE: descriptor})


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    report_ready({PIPE: str(writing)})

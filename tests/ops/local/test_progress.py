"""The progress of a command: one line that is redrawn on a terminal, one line per phase elsewhere."""

from __future__ import annotations

import io

from quire.ops.local.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_cleared_before_the_next() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress.update("loading 1 %", "loading")
    progress.update("loading 2 %", "loading")
    progress.say("done")
    assert stream.getvalue().count("\r\x1b[2K") == 3
    assert stream.getvalue().endswith("\r\x1b[2Kdone\n")


def test_elsewhere_each_phase_is_printed_once() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for text, phase in (("loading 1 %", "loading"), ("loading 2 %", "loading"), ("warming up", "warming up")):
        progress.update(text, phase)
    progress.say("done")
    lines = stream.getvalue().splitlines()
    assert [line.partition("  ")[2] for line in lines[:2]] == ["loading 1 %", "warming up"]
    assert lines[2:] == ["done"]


def test_a_closed_stream_is_no_error() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    stream.close()
    progress.say("done")

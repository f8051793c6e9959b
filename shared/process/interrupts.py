"""Ctrl-C while a command starts: the process ends at once, silently, with the exit code of an interrupted command.

Python's own handler raises KeyboardInterrupt wherever the main thread is. In the middle of an import this prints a
traceback, and some packages turn it into an error of their own.
"""

from __future__ import annotations

import os
import signal

# The exit code that a shell reports for a command that SIGINT has ended.
EXIT_CODE = 130


def end_now(number: int, frame: object) -> None:
    """End the process without cleaning up, as a signal handler."""
    os._exit(EXIT_CODE)


def end_at_ctrl_c() -> None:
    """Make Ctrl-C end the process at once. Call this only while there is nothing to clean up.

    Nothing changes if SIGINT is ignored or has another handler than Python's own, or outside of the main thread.
    """
    _replace(signal.default_int_handler, end_now)


def raise_at_ctrl_c() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, for a command that has something to clean up."""
    _replace(end_now, signal.default_int_handler)


def _replace(before: object, after: signal._HANDLER) -> None:
    if signal.getsignal(signal.SIGINT) is before:
        try:
            signal.signal(signal.SIGINT, after)
        except ValueError:  # not the main thread
            return

"""The command `quire` with a wrong clock: TEST_CLOCK_S is the number of seconds by which it is fast."""

from __future__ import annotations

import os
import sys
import time

from quire.ops.cli.main import main

CLOCK_S = float(os.environ.get("TEST_CLOCK_S", "0"))
_now = time.time


def skewed() -> float:
    return _now() + CLOCK_S


if __name__ == "__main__":
    time.time = skewed
    sys.exit(main())

"""The console script of the package quire-worker: `python -m quire.worker` is `quire-worker`.

`main` sets the handler of Ctrl-C before it imports the slow modules.
"""

from __future__ import annotations

import sys

from quire.shared.process.interrupts import end_at_ctrl_c


def main() -> int:
    """Start one worker (`quire-worker`)."""
    end_at_ctrl_c()
    from quire.shared.config.command_line import run_script
    from quire.worker.commands import WORKER

    return run_script("quire-worker", WORKER)


if __name__ == "__main__":
    sys.exit(main())

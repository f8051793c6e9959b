"""The console script `quire-gateway`. `python -m quire.gateway` is the same.

It takes over Ctrl-C before it imports the rest. Commands of features are `__main__` modules of their own.
"""

from __future__ import annotations

import sys

from quire.shared.process.interrupts import end_at_ctrl_c


def main() -> int:
    """`quire-gateway`: start one gateway."""
    end_at_ctrl_c()
    from quire.gateway.server.commands import GATEWAY
    from quire.shared.config.command_line import run_script

    return run_script("quire-gateway", GATEWAY)


if __name__ == "__main__":
    sys.exit(main())

"""The console script `quire-dead`: look at requests that were given up.

The settings of the gateway may be in its environment. It takes over Ctrl-C before it imports the rest.
"""

from __future__ import annotations

import sys

from quire.shared.process.interrupts import end_at_ctrl_c


def main() -> int:
    """Run `quire-dead`."""
    end_at_ctrl_c()
    from quire.gateway.features.admin.commands import DEAD_LETTERS
    from quire.gateway.settings import GatewaySettings
    from quire.shared.config.command_line import run_script

    return run_script("quire-dead", DEAD_LETTERS, known=[GatewaySettings])


if __name__ == "__main__":
    sys.exit(main())

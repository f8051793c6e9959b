"""The console scripts of the package quire-gateway. `python -m quire.gateway` is `quire-gateway`.

Each takes over Ctrl-C before it imports the rest.
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


def dead_letters() -> int:
    """`quire-dead`: look at requests that were given up. The settings of the gateway may be in its environment."""
    end_at_ctrl_c()
    from quire.gateway.features.admin.commands import DEAD_LETTERS
    from quire.gateway.server.commands import GATEWAY
    from quire.shared.config.command_line import run_script

    return run_script("quire-dead", DEAD_LETTERS, known=[GATEWAY.settings])


def parking() -> int:
    """`quire-parking`: park requests and queue them again. The settings of the gateway may be in its environment."""
    end_at_ctrl_c()
    from quire.gateway.features.parking.commands import PARKING
    from quire.gateway.server.commands import GATEWAY
    from quire.shared.config.command_line import run_script

    return run_script("quire-parking", PARKING, known=[GATEWAY.settings])


def api_keys() -> int:
    """`quire-keys`: make and limit API keys. The settings of the gateway may be in its environment."""
    end_at_ctrl_c()
    from quire.gateway.features.keys.commands import KEYS
    from quire.gateway.server.commands import GATEWAY
    from quire.shared.config.command_line import run_script

    return run_script("quire-keys", KEYS, known=[GATEWAY.settings])


if __name__ == "__main__":
    sys.exit(main())

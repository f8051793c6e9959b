"""Free ports of this machine."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1", family: int = socket.AF_INET) -> int:
    """Return a port of an address that is free now. Another process may take it before the caller does."""
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])

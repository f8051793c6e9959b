"""A free port can be listened on, on the address and family that the caller names."""

from __future__ import annotations

import socket

import pytest

from quire.ops.local.ports import free_port


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_free_port_can_be_listened_on(host: str, family: int) -> None:
    port = free_port(host, family)
    assert 1024 <= port <= 65535
    with socket.create_server((host, port), family=family) as server:
        assert server.getsockname()[1] == port


def test_the_default_is_the_loopback_address() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass

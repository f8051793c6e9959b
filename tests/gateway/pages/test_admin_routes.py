"""Without an admin key the admin API has no routes; a weak key is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.pages.admin_routes import admin_routes
from quire.gateway.serving.service import Gateway
from quire.gateway.settings import GatewaySettings
from quire.shared.errors import StartError


def paths(**settings: Any) -> list[str]:
    model: Any = type("Model", (), {"name": "m"})()
    return [route.path for route in admin_routes(Gateway(GatewaySettings(**settings), model))]


def test_the_admin_api_is_off_without_a_key() -> None:
    assert paths() == ["/v1/usage"]
    assert {"/admin/adapters", "/admin/keys", "/admin/usage"} < set(paths(admin_key="0123456789abcdef"))


def test_a_weak_key_is_refused() -> None:
    with pytest.raises(StartError, match="--admin-key"):
        paths(admin_key="weak")

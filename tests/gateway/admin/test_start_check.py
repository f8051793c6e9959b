"""A gateway that other machines reach starts only with a key, an admin key, or permission."""

from __future__ import annotations

import pytest

from quire.gateway.admin.start_check import check_start
from quire.gateway.settings import GatewaySettings
from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from quire.shared.errors import StartError
from quire.shared.keys import ACCOUNTS_TAG
from quire.shared.redis.clients import command_client


async def test_a_gateway_without_keys_does_not_start(redis_url: str) -> None:
    with pytest.raises(StartError, match=r"quire keys create.*--allow-anonymous"):
        await check_start(redis_url, "0.0.0.0", is_open=False, has_admin_key=False)
    await check_start(redis_url, "0.0.0.0", is_open=True, has_admin_key=False)
    await check_start(redis_url, "0.0.0.0", is_open=False, has_admin_key=True)
    client = command_client(redis_url, ACCOUNTS_TAG)
    await AccountStore(client, "test").create("acme", "web", "test", AccountLimits())
    await client.aclose()
    await check_start(redis_url, "0.0.0.0", is_open=False, has_admin_key=False)


async def test_a_redis_that_does_not_answer_is_named() -> None:
    with pytest.raises(StartError, match="--redis-url"):
        await check_start("redis://127.0.0.1:1/0", "0.0.0.0", is_open=False, has_admin_key=False)


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        ({}, True),
        ({"require_keys": True}, False),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": ""}, False),
        ({"host": "gateway.example.com"}, False),
        ({"host": "0.0.0.0", "allow_anonymous": True}, True),
    ],
)
def test_only_a_loopback_address_or_permission_opens_a_gateway(settings: dict[str, object], is_open: bool) -> None:
    assert GatewaySettings(**settings).is_open is is_open  # type: ignore[arg-type]


def test_contradicting_settings_are_refused() -> None:
    with pytest.raises(StartError, match="both given"):
        _ = GatewaySettings(allow_anonymous=True, require_keys=True).is_open

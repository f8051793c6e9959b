"""A gateway that other machines reach starts only with a key, an admin key, or permission."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.gateway.server.start_check import check_start, make_first_key
from quire.gateway.settings import GatewaySettings
from quire.shared.accounts.secret import key_id_of
from quire.shared.errors import StartError


async def test_a_gateway_without_keys_does_not_start(redis_url: str) -> None:
    public = GatewaySettings(redis_url=redis_url, host="0.0.0.0")
    local = GatewaySettings(redis_url=redis_url, require_keys=True)
    with pytest.raises(
        StartError, match=r"--host 0\.0\.0\.0 lets .*quire keys create.*, or --allow-anonymous to accept"
    ):
        await check_start(public)
    with pytest.raises(
        StartError, match=r"because --require-keys is set, .*--allow-anonymous instead of --require-keys"
    ):
        await check_start(local)
    await check_start(replace(public, allow_anonymous=True))
    await check_start(replace(public, admin_key_file="/run/secrets/admin"))
    secret = await make_first_key(redis_url)
    assert key_id_of(secret)
    await check_start(public)
    await check_start(local)


async def test_a_redis_that_does_not_answer_is_named() -> None:
    with pytest.raises(StartError, match="--redis-url"):
        await check_start(GatewaySettings(redis_url="redis://127.0.0.1:1/0", host="0.0.0.0"))


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

"""Retries of commands about API keys: a lasting outage is waited for once, and later commands are refused at once."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.gateway.admission import retry
from quire.gateway.admission.account_retry import AccountRetry
from quire.gateway.errors.api_errors import BrokerDown


class Command:
    """Fails while `is_down`. attempts: how often it was sent."""

    def __init__(self) -> None:
        self.is_down = True
        self.attempts = 0

    async def __call__(self) -> str:
        self.attempts += 1
        if self.is_down:
            raise RedisConnectionError("refused")
        return "answer"


async def test_after_an_outage_commands_are_refused_at_once_until_one_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.1)
    accounts, command = AccountRetry(), Command()
    with pytest.raises(BrokerDown):
        await accounts(command)
    assert command.attempts > 1
    command.attempts = 0
    with pytest.raises(BrokerDown):
        await accounts(command)
    assert command.attempts == 1
    command.is_down = False
    assert await accounts(command) == "answer"
    assert accounts.ready.is_set()
    # The next outage is waited for again.
    command.is_down, command.attempts = True, 0
    asyncio.get_running_loop().call_later(0.03, lambda: setattr(command, "is_down", False))
    assert await accounts(command) == "answer"
    assert command.attempts > 1


async def test_a_change_is_sent_once() -> None:
    accounts, command = AccountRetry(), Command()
    with pytest.raises(BrokerDown):
        await accounts.once(command())
    assert command.attempts == 1

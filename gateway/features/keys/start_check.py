"""API keys at the start: a gateway that would refuse every call does not start, and `quire serve` makes a first key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.exceptions import RedisError

from quire.gateway.settings import GatewaySettings
from quire.shared.accounts.account import DEFAULT_NAME
from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from quire.shared.process.errors import StartError
from quire.shared.protocol.keys import ACCOUNTS_TAG
from quire.shared.redis.clients import command_client


async def check_start(settings: GatewaySettings) -> None:
    """Raise StartError if no call could be accepted.

    A gateway that requires keys needs one in Redis, or an admin key, with which keys are made.
    """
    if needs_key(settings) and not await has_keys(settings.redis_url):
        raise no_key(settings, "`quire keys create` and the same --redis-url")


async def has_keys(redis_url: str) -> bool:
    """Return True if an API key was ever made. Raises StartError."""
    async with _accounts(redis_url) as store:
        return await store.has_keys()


async def make_first_key(redis_url: str) -> str:
    """Make an API key, and return its secret. Raises StartError."""
    async with _accounts(redis_url) as store:
        _, secret = await store.create(DEFAULT_NAME, DEFAULT_NAME, "first", AccountLimits())
        return secret


def needs_key(settings: GatewaySettings) -> bool:
    """Return True if the gateway accepts no call before there is a key in Redis. Raises StartError."""
    return not settings.is_open and not settings.admin_key and not settings.admin_key_file


def no_key(settings: GatewaySettings, create: str) -> StartError:
    """Return the error for a missing key. create: how to make one, as the words after `make one with`."""
    forced = settings.require_keys
    cause = "--require-keys is set" if forced else f"--host {settings.host} lets other machines call this gateway"
    anonymous = "--allow-anonymous" + (" instead of --require-keys" if forced else "")
    return StartError(
        f"calls need an API key, because {cause}, and there is no key: make one with {create}, or pass "
        f"--admin-key-file for the admin API, or {anonymous} to accept calls without a key"
    )


@asynccontextmanager
async def _accounts(redis_url: str) -> AsyncIterator[AccountStore]:
    client = command_client(redis_url, ACCOUNTS_TAG, connections=1)
    try:
        yield AccountStore(client, "quire serve")
    except (RedisError, OSError) as error:
        raise StartError(f"the API keys cannot be read from --redis-url (QUIRE_REDIS_URL): {error}") from error
    finally:
        await client.aclose()

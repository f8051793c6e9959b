"""Refuses to start a gateway that everyone could use."""

from __future__ import annotations

from redis.exceptions import RedisError

from quire.shared.accounts.store import AccountStore
from quire.shared.errors import StartError
from quire.shared.keys import ACCOUNTS_TAG
from quire.shared.redis.clients import command_client


async def check_start(redis_url: str, host: str, *, is_open: bool, has_admin_key: bool) -> None:
    """Raise StartError if no call could be accepted.

    A gateway that other machines reach needs an API key in Redis, or an admin key, with which keys are made.
    """
    if is_open or has_admin_key:
        return
    client = command_client(redis_url, ACCOUNTS_TAG, connections=1)
    try:
        has_keys = await AccountStore(client, "gateway").has_keys()
    except (RedisError, OSError) as error:
        raise StartError(f"the API keys cannot be read from --redis-url (QUIRE_REDIS_URL): {error}") from error
    finally:
        await client.aclose()
    if not has_keys:
        raise StartError(
            f"--host {host} lets other machines call this gateway, and there is no API key: make one with "
            "`quire keys create`, or pass --admin-key-file for the admin API, or pass --allow-anonymous to accept "
            "calls without a key"
        )

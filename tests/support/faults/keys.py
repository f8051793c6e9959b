"""API keys of the fault tests."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from quire.shared.protocol.keys import ACCOUNTS_TAG
from quire.shared.redis.clients import command_client


def make_keys(url: str, *tenants: str, life_s: int = 0, **limits: int) -> list[tuple[str, str]]:
    """Make an API key with these limits for each tenant, an organisation and a project with a slash between them.

    life_s: seconds of Redis' clock after which the keys expire; 0 for never. Returns id and secret of each.
    """

    async def make() -> list[tuple[str, str]]:
        client = command_client(url, ACCOUNTS_TAG, connections=1)
        try:
            store = AccountStore(client, "test")
            expires = int(await store.now()) + life_s if life_s else 0
            asked = AccountLimits.of(limits)
            made = [await store.create(*one.split("/"), uuid4().hex, asked, expires) for one in tenants]
            return [(account.id, secret) for account, secret in made]
        finally:
            await client.aclose()

    return asyncio.run(make())


def make_key(url: str, project: str = "web", life_s: int = 86_400, **limits: int) -> str:
    """Make an API key of a project. Returns its secret."""
    [(_, secret)] = make_keys(url, f"acme/{project}", life_s=life_s, **limits)
    return secret


def bearers(keys: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Return the headers of calls with these keys."""
    return [{"Authorization": f"Bearer {secret}"} for _, secret in keys]

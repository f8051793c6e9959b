"""API keys of the fault tests."""

from __future__ import annotations

import asyncio

from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from quire.shared.protocol.keys import ACCOUNTS_TAG
from quire.shared.redis.clients import command_client


def make_key(url: str, project: str = "web", life_s: int = 86_400, **limits: int) -> str:
    """Make an API key that expires in so many seconds of Redis' clock. Returns its secret."""

    async def make() -> str:
        client = command_client(url, ACCOUNTS_TAG, connections=1)
        try:
            store = AccountStore(client, "test")
            expires = int(await store.now()) + life_s
            return (await store.create("acme", project, "ci", AccountLimits.of(limits), expires))[1]
        finally:
            await client.aclose()

    return asyncio.run(make())

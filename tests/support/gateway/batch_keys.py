"""API keys for tests of files and batches."""

from __future__ import annotations

from typing import Any

from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from tests.support.gateway.batch_calls import BatchClient
from tests.support.gateway.running import RunningGateway


async def with_key(gateway: RunningGateway, project: str = "web", **limits: Any) -> tuple[BatchClient, str]:
    """Make a key; returns a client with it, and the id of the key."""
    store = AccountStore(gateway.gateway.process.keys.client, "test")
    account, secret = await store.create("acme", project, "test", AccountLimits.of(limits))
    return BatchClient(gateway, secret), account.id

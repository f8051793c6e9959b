"""The API keys that a gateway knows: accounts that it read from Redis less than FRESH_S ago."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from functools import partial

from quire.gateway.admission.retry import AccountRetry
from quire.gateway.api.caller import ANONYMOUS, Caller
from quire.gateway.errors.api_errors import ApiKeyWrong
from quire.shared.accounts.account import Account
from quire.shared.accounts.secret import digest_of, key_id_of
from quire.shared.accounts.store import AccountStore
from quire.shared.config.validators import InvalidValue

log = logging.getLogger("gateway")

# Seconds for which an account is not read again: a revocation or a new limit takes effect within this time.
FRESH_S = 1.0
# Keys whose accounts are remembered, unknown ones included.
MAX_KEYS = 10_000

_NOBODY = Account(kind="key", id="0" * 16, name="nobody", digest="0" * 64)


class KeyRing:
    """Finds the caller of a secret. Raises BrokerDown while Redis is away."""

    def __init__(self, store: AccountStore, retry: AccountRetry) -> None:
        self.store = store
        self._retry = retry
        # Accounts by key id, with the time at which they were read; the least recently used first.
        self._known: OrderedDict[str, tuple[float, tuple[Account, ...]]] = OrderedDict()
        # Unix time of Redis minus the monotonic clock of this process, measured with each reading of accounts.
        self._ahead_s = 0.0

    async def caller(self, secret: str) -> Caller:
        """Return the caller that has this secret. Raises ApiKeyWrong.

        The error says the same for an unknown key and for a wrong secret; only who has the secret learns that its key
        was revoked or has expired.
        """
        key_id = key_id_of(secret)
        chain = await self.accounts(key_id) if key_id else ()
        fault = (chain[0] if chain else _NOBODY).fault(digest_of(secret), self._now())
        if fault in ("revoked", "expired"):
            raise _wrong(f"The API key {key_id} has expired or was revoked; ask for a new one.")
        if fault:
            raise _wrong("The API key is not valid. Send one as Authorization: Bearer KEY or x-api-key: KEY.")
        return Caller(key_id, chain)

    async def owner(self, key_id: str) -> Caller:
        """Return the caller that has a key now, without its secret: of work that goes on after the call.

        key_id: empty for a caller without a key. Raises ApiKeyWrong if the key was revoked or has expired.
        """
        if not key_id:
            return ANONYMOUS
        chain = await self.accounts(key_id)
        if not chain or chain[0].revoked or 0 < chain[0].expires <= self._now():
            raise _wrong(f"The API key {key_id} has expired or was revoked.")
        return Caller(key_id, chain)

    async def accounts(self, key_id: str) -> tuple[Account, ...]:
        """Return a key, its project and its organisation; empty if there is no such key."""
        now = time.monotonic()
        known = self._known.get(key_id)
        if known is not None and now - known[0] < FRESH_S:
            self._known.move_to_end(key_id)
            return known[1]
        try:
            chain = await self._retry(partial(self._read, key_id, known[1] if known else ()))
        except InvalidValue as error:
            log.error("the accounts of key %s are corrupt in Redis, so its calls are refused: %s", key_id, error)
            chain = ()
        self._known[key_id] = now, chain
        self._known.move_to_end(key_id)
        if len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)
        return chain

    async def _read(self, key_id: str, known: tuple[Account, ...]) -> tuple[Account, ...]:
        now, chain = await asyncio.gather(self.store.now(), self.store.chain(key_id, known))
        self._ahead_s = now - time.monotonic()
        return chain

    def _now(self) -> float:
        """Return the unix time of Redis."""
        return time.monotonic() + self._ahead_s

    def forget(self) -> None:
        """Read all accounts again when they are used next, because some were changed through this gateway."""
        self._known.clear()


def _wrong(message: str) -> ApiKeyWrong:
    return ApiKeyWrong(message, headers={"WWW-Authenticate": "Bearer"})

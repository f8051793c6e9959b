"""The caller of an HTTP request: the API key with which it came.

Every call in Redis has an owner, the id of the key that made it. A caller finds only what it owns; calls without a key
have the owner '' and share what they make.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from quire.shared.protocol.charge import ChargedAccount


@dataclass(frozen=True, slots=True)
class Caller:
    """The maker of a call. owner: the id of the API key; empty without one. accounts: key, project and organisation."""

    owner: str = ""
    accounts: tuple[ChargedAccount, ...] = ()

    def scoped(self, idempotency_key: str) -> str:
        """Return the idempotency key as Redis has it: the same text of two callers names two calls.

        A client cannot send a key with a space, so no client can write the name of another caller's key.
        """
        return f"{self.owner} {idempotency_key}" if self.owner and idempotency_key else idempotency_key


ANONYMOUS = Caller()
CALLER = web.RequestKey("caller", Caller)


def caller_of(request: web.BaseRequest) -> Caller:
    """Return the caller that the authentication found; ANONYMOUS without a key."""
    caller: Caller = request.get(CALLER, ANONYMOUS)
    return caller

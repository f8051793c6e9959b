"""The charge of a request: the limits of its accounts, and the prices of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

# Limits whose end is a new day or month; the others allow the call after some seconds.
BUDGETS = frozenset(("tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month"))


class ChargedAccount(Protocol):
    """An account that a request is charged to. `quire.shared.accounts.account.Account` is one."""

    @property
    def place(self) -> str:
        """The name of the account in the counters, and in `LimitReached`."""
        ...

    def charged_limits(self) -> list[Any]:
        """Return the name of the account and its limits, as `_limits.lua` reads them."""
        ...


class LimitReached(Exception):
    """A limit of an account does not allow a request. wait_ms: until it does; -1 if it never does as it is now."""

    def __init__(self, limit: str, account: str, wait_ms: int) -> None:
        super().__init__(f"{limit} of {account}")
        self.limit = limit
        self.account = account
        self.wait_ms = wait_ms

    @property
    def is_budget(self) -> bool:
        return self.limit in BUDGETS


@dataclass(frozen=True, slots=True)
class RateState:
    """A limit per minute after a request: the limit, the rest of it, and the milliseconds until it is unused again."""

    limit: int
    left: int
    full_in_ms: int


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a token of a prompt and of an answer, in billionths."""

    prompt: int = 0
    completion: int = 0


def tightest(states: Sequence[Sequence[int]]) -> dict[str, RateState]:
    """Return the tightest of the limits per minute of `calls` and of `tokens` that `submit` returned for each account.

    A kind of limit that no account has is left out.
    """
    found: dict[str, RateState] = {}
    for name, at in (("calls", 0), ("tokens", 3)):
        rates = [RateState(*(int(value) for value in state[at : at + 3])) for state in states if int(state[at])]
        if rates:
            found[name] = min(rates, key=lambda state: state.left)
    return found


def packed_limits(accounts: Sequence[ChargedAccount]) -> bytes:
    """Return the names of accounts and their limits, as `unpark` reads them; empty without accounts."""
    return bytes(msgpack.packb([account.charged_limits() for account in accounts])) if accounts else b""

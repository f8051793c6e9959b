"""The charge of a call: the accounts of its key, and the prices of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from quire.shared.protocol.keys import AccountKeys

if TYPE_CHECKING:
    from quire.shared.accounts.account import Account

# Limits whose end is a new day or month; the others allow the call after some seconds.
BUDGETS = frozenset(("tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month"))


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


@dataclass(slots=True)
class Charge:
    """The accounts of one call. accounts: key, project and organisation. prefix: of the accounts' keys in Redis.

    park_s: the call is accepted if the budgets suffice for a part of its answer, and parked for at most this many
    seconds when they are used up; 0 refuses such a call.

    `submit` sets `calls` and `tokens` to the state of the tightest limits per minute; None without such a limit.
    """

    accounts: tuple[Account, ...]
    model: str
    price: Price = Price()
    park_s: int = 0
    prefix: str = AccountKeys().prefix
    calls: RateState | None = None
    tokens: RateState | None = None

    def encode(self, prompt_tokens: int, *, begins_call: bool) -> bytes:
        """Return the charge of a request, as `_limits.lua` reads it."""
        parts: list[Any] = [self.prefix, int(begins_call), prompt_tokens, self.price.prompt, self.price.completion]
        packed: bytes = msgpack.packb(
            [*parts, self.model, self.park_s, *map(_packed, self.accounts)], use_bin_type=True
        )
        return packed

    def encode_accounts(self) -> bytes:
        """Return the accounts and their limits, as `unpark` reads them."""
        packed: bytes = msgpack.packb(list(map(_packed, self.accounts)), use_bin_type=True)
        return packed

    def note(self, states: Sequence[Sequence[int]]) -> None:
        """Keep the tightest of the limits that `submit` returned for each account."""
        for name, at in (("calls", 0), ("tokens", 3)):
            rates = [RateState(*(int(value) for value in state[at : at + 3])) for state in states if int(state[at])]
            if rates:
                setattr(self, name, min(rates, key=lambda state: state.left))


def _packed(account: Account) -> list[Any]:
    """Return the name of an account and its limits, as `_limits.lua` reads them."""
    limits = account.limits
    return [
        account.place,
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.concurrent_requests,
        limits.tokens_per_day,
        limits.tokens_per_month,
        limits.cost_per_day,
        limits.cost_per_month,
    ]

"""The limits of an account: an API key, a project or an organisation. A value of 0, or an empty one, is no limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from typing import Any

from quire.shared.config.validators import Integer, InvalidValue, OneOf, Texts, checked
from quire.shared.protocol.keys import PRIORITY_CLASSES
from quire.shared.protocol.share import MAX_WEIGHT

MAX_MODELS = 64
MAX_MODEL_LENGTH = 512
# Counters of Redis scripts are exact up to 2^53. Rates have a smaller bound: a bucket counts 60,000ths of a token.
MAX_RATE = 10**10
MAX_TOKENS = 10**15
# Money is counted in billionths of the unit of the prices; a price is for a million tokens.
NANOS = 10**9
MAX_MONEY = 10**6
MAX_PRICE = 10**6

COSTS = ("cost_per_day", "cost_per_month")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountLimits:
    """Limits of one account.

    models: names that calls may use. priority: highest class of its calls; `standard` if no account of a key
    has one. max_tokens: of one call. Costs are in
    billionths of the unit of the prices. weight: of a project in fair sharing; other accounts have none.
    """

    models: tuple[str, ...] = checked(Texts(MAX_MODELS, 1, MAX_MODEL_LENGTH), default=())
    priority: str = checked(OneOf(("", *PRIORITY_CLASSES)), default="")
    max_tokens: int = checked(Integer(0, MAX_RATE), default=0)
    requests_per_minute: int = checked(Integer(0, MAX_RATE), default=0)
    tokens_per_minute: int = checked(Integer(0, MAX_RATE), default=0)
    concurrent_requests: int = checked(Integer(0, MAX_RATE), default=0)
    tokens_per_day: int = checked(Integer(0, MAX_TOKENS), default=0)
    tokens_per_month: int = checked(Integer(0, MAX_TOKENS), default=0)
    cost_per_day: int = checked(Integer(0, MAX_MONEY * NANOS), default=0)
    cost_per_month: int = checked(Integer(0, MAX_MONEY * NANOS), default=0)
    weight: int = checked(Integer(0, MAX_WEIGHT), default=0)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> AccountLimits:
        """Read limits as a client writes them: costs are decimal numbers. Raise InvalidValue."""
        if unknown := sorted(given.keys() - set(LIMITS)):
            raise InvalidValue(unknown[0][:80], f"must be one of {', '.join(LIMITS)}")
        values = {name: nanos(name, value) if name in COSTS else value for name, value in given.items()}
        return cls.stored(values)

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> AccountLimits:
        """Read limits as Redis has them. Raise InvalidValue."""
        if unknown := sorted(values.keys() - set(LIMITS)):
            raise InvalidValue(unknown[0][:80], "is not a limit")
        checks = {field.name: field.metadata["check"] for field in fields(cls)}
        return cls(**{name: checks[name](name, value) for name, value in values.items()})

    def given(self) -> dict[str, Any]:
        """Return the limits that are set, as `stored` reads them."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self)
            if (value := getattr(self, field.name))
        }

    def shown(self) -> dict[str, Any]:
        """Return the limits that are set, as `of` reads them."""
        return {name: money(value) if name in COSTS else value for name, value in self.given().items()}


LIMITS = tuple(field.name for field in fields(AccountLimits))


def nanos(name: str, value: Any, most: int = MAX_MONEY) -> int:
    """Return an amount of money, a number or its text, in billionths. Raise InvalidValue."""
    try:
        amount = Decimal(str(value)) if type(value) in (int, float, str) and len(str(value)) < 40 else Decimal("NaN")
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or not 0 <= amount <= most or amount * NANOS != int(amount * NANOS):
        raise InvalidValue(name, f"must be a number from 0 to {most} with at most 9 decimals")
    return int(amount * NANOS)


def money(value: int) -> float:
    """Return an amount in billionths as a number for clients."""
    return float(Decimal(value) / NANOS)

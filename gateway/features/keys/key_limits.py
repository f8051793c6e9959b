"""The limits of an API key while a call is submitted: what it is charged to, and the headers for clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from aiohttp import web

from quire.gateway.api.call import Call
from quire.gateway.api.caller import Caller
from quire.gateway.api.headers import ANSWER_HEADERS
from quire.gateway.errors.api_errors import PermissionDenied
from quire.gateway.features.keys.key_policy import accounts_of, restricted
from quire.shared.accounts.limits import COSTS, MAX_PRICE, nanos
from quire.shared.config.validators import InvalidValue
from quire.shared.process.errors import StartError
from quire.shared.protocol.broker import Admission
from quire.shared.protocol.charge import Price, RateState
from quire.shared.protocol.keys import AccountKeys, LaneKeys
from quire.shared.protocol.share import ANONYMOUS_TENANT, DEFAULT_WEIGHT
from quire.shared.redis.url import parse_redis_url

C = TypeVar("C", bound=Call)

# Tokens that a price is for. Redis counts billionths for a token, so a price has at most three decimals.
TOKENS = 1_000_000


def read_prices(text: str) -> dict[str, Price]:
    """Read the setting --prices: `MODEL=INPUT:OUTPUT`, separated by commas. Raises StartError."""
    by_model = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        model, _, values = part.rpartition("=")
        try:
            prices = [nanos("price", value, MAX_PRICE) for value in values.split(":")]
        except InvalidValue:
            prices = []
        if not model or len(prices) != 2 or any(price % TOKENS for price in prices):
            raise StartError(
                f"--prices (QUIRE_PRICES): {part!r} is not MODEL=INPUT:OUTPUT, prices of a million tokens from 0 to "
                f"{MAX_PRICE} with at most three decimals, such as qwen=0.25:1.25"
            )
        by_model[model] = Price(*(price // TOKENS for price in prices))
    return by_model


class KeyLimits:
    """Charges calls to the accounts of their keys."""

    def __init__(
        self,
        redis_url: str,
        lane: str,
        prices: Mapping[str, Price],
        park_s: int = 0,
        cache_scope: str = "organisation",
    ) -> None:
        """park_s: of the terms, see `Admission`. cache_scope: the kind of account whose calls share cached prefixes."""
        # A script reaches one slot of a cluster only, so there each model has counters of its own.
        self.is_cluster = parse_redis_url(redis_url).kind == "cluster"
        self.prefix = LaneKeys(lane).prefix if self.is_cluster else AccountKeys().prefix
        self._prices = prices
        self._lane = lane
        self._park_s = park_s
        self._cache_scope = cache_scope

    def restricted(self, caller: Caller, call: C, body: Mapping[str, Any]) -> C:
        """Return a call within the limits of its key (`key_policy.restricted`) and its scope. Raises ApiError."""
        call = restricted(caller, call, body)
        scope = self.scope_of(caller)
        return replace(call, cache_scope=scope, pinned_for=caller.owner) if scope or caller.owner else call

    def scope_of(self, caller: Caller) -> str:
        """Return the tenant within which calls share cached prefixes and images; empty for all."""
        return next((account.place for account in accounts_of(caller) if account.kind == self._cache_scope), "")

    def tell(self, request: web.BaseRequest, rates: Mapping[str, RateState]) -> None:
        """Add the headers about the limits per minute to the answer of a request."""
        request[ANSWER_HEADERS] = _rate_headers(rates)

    def charged(self, caller: Caller, model: str, terms: Admission, user: str) -> Admission:
        """Return the terms of a call with its owner, what it is charged to, and who it counts for.

        model: that the call names, perhaps an adapter. user: the hash of the user of the call; empty without one.
        Raises ApiError.
        """
        terms = terms._replace(idempotency_key=caller.scoped(terms.idempotency_key), owner=caller.owner, user=user)
        if not caller.accounts:
            return terms
        price = self._prices.get(model, self._prices.get(self._lane))
        if price is None and any(getattr(account.limits, name) for account in accounts_of(caller) for name in COSTS):
            raise PermissionDenied(
                f"Your API key has a budget in money, and {model[:200]!r} has no price; ask for one.", param="model"
            )
        project = next((account for account in accounts_of(caller) if account.kind == "project"), None)
        return terms._replace(
            accounts=caller.accounts,
            account_prefix=self.prefix,
            model=model,
            price=price or Price(),
            park_s=self._park_s,
            tenant=project.id if project else ANONYMOUS_TENANT,
            weight=(project and project.limits.weight) or DEFAULT_WEIGHT,
        )


def _rate_headers(rates: Mapping[str, RateState]) -> dict[str, str]:
    """Return OpenAI's headers about the limits per minute, of the tightest account."""
    headers = {}
    for name, rate in (("requests", rates.get("calls")), ("tokens", rates.get("tokens"))):
        if rate is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(rate.left)
            headers[f"x-ratelimit-reset-{name}"] = duration(rate.full_in_ms)
    return headers


def duration(ms: int) -> str:
    """Return a duration as OpenAI writes it: 20ms, 1.5s, 1m2s."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:g}s" if rest or not minutes else ""
    return f"{minutes}m{seconds}" if minutes else seconds

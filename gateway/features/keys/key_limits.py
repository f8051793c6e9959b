"""The limits of an API key while a call is submitted: what it is charged to, and the headers for clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from aiohttp import web

from quire.gateway.admission.submission import AdmissionOptions
from quire.gateway.api.call import Call
from quire.gateway.api.caller import Caller
from quire.gateway.api.headers import ANSWER_HEADERS
from quire.gateway.errors.api_errors import PermissionDenied
from quire.gateway.features.keys.key_policy import restricted
from quire.shared.accounts.limits import COSTS, MAX_PRICE, nanos
from quire.shared.config.validators import InvalidValue
from quire.shared.process.errors import StartError
from quire.shared.protocol.charge import Charge, Price
from quire.shared.protocol.keys import AccountKeys, LaneKeys
from quire.shared.protocol.share import DEFAULT_WEIGHT, Share
from quire.shared.redis.url import parse_redis_url

C = TypeVar("C", bound=Call)

# Tokens that a price is for. Redis counts billionths for a token, so a price has at most three decimals.
TOKENS = 1_000_000


def read_prices(text: str) -> dict[str, Price]:
    """Read the setting --prices: `MODEL=INPUT:OUTPUT`, separated by commas. Raises StartError."""
    found = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
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
        found[model] = Price(*(price // TOKENS for price in prices))
    return found


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
        """park_s: of the charges, see `Charge`. cache_scope: the kind of account whose calls share cached prefixes."""
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
        scope = next((account.place for account in caller.accounts if account.kind == self._cache_scope), "")
        return replace(call, options=replace(call.options, cache_scope=scope)) if scope else call

    def charged(self, caller: Caller, model: str, options: AdmissionOptions, user: str) -> AdmissionOptions:
        """Return admission options with the owner of a call, what it is charged to, and who it counts for.

        user: the hash of the user of the call; empty without one. Raises ApiError.
        """
        return replace(
            options,
            idempotency_key=caller.scoped(options.idempotency_key),
            owner=caller.owner,
            charge=self.charge(caller, model),
            share=share_of(caller, user),
        )

    def tell(self, request: web.BaseRequest, charge: Charge | None) -> None:
        """Add the headers about the limits to the answer of a request."""
        if charge is not None:
            request[ANSWER_HEADERS] = rate_headers(charge)

    def charge(self, caller: Caller, model: str) -> Charge | None:
        """Return what a call for a model, or an adapter of it, is charged to; None without a key. Raises ApiError."""
        if not caller.accounts:
            return None
        price = self._prices.get(model, self._prices.get(self._lane))
        if price is None and any(getattr(one.limits, name) for one in caller.accounts for name in COSTS):
            raise PermissionDenied(
                f"Your API key has a budget in money, and {model[:200]!r} has no price; ask for one.", param="model"
            )
        return Charge(caller.accounts, model, price or Price(), self._park_s, self.prefix)


def share_of(caller: Caller, user: str) -> Share:
    """Return who a call counts for: the project of its key, or the tenant of all calls without a key."""
    for account in caller.accounts:
        if account.kind == "project":
            return Share(account.id, user, account.limits.weight or DEFAULT_WEIGHT)
    return Share(user=user)


def rate_headers(charge: Charge) -> dict[str, str]:
    """OpenAI's headers about the limits per minute, of the tightest account."""
    headers = {}
    for name, state in (("requests", charge.calls), ("tokens", charge.tokens)):
        if state is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(state.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(state.left)
            headers[f"x-ratelimit-reset-{name}"] = duration(state.full_in_ms)
    return headers


def duration(ms: int) -> str:
    """A duration as OpenAI writes it: 20ms, 1.5s, 1m2s."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:g}s" if rest or not minutes else ""
    return f"{minutes}m{seconds}" if minutes else seconds

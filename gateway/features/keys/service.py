"""The API keys of a gateway process: who calls, what a key may use, and the limits of its calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Middleware
from redis.asyncio import Redis

from quire.gateway.admission.retry import AccountRetry
from quire.gateway.api.caller import Caller
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.features.keys import key_policy, start_check
from quire.gateway.features.keys.authentication import authentication
from quire.gateway.features.keys.key_calls import KeyCalls
from quire.gateway.features.keys.key_limits import KeyLimits, read_prices
from quire.gateway.features.keys.key_ring import KeyRing
from quire.gateway.features.keys.limit_errors import error_of
from quire.gateway.features.keys.reached_limits import ReachedLimits
from quire.gateway.features.keys.usage_calls import UsageCalls
from quire.gateway.settings import GatewaySettings
from quire.shared.accounts.store import AccountStore
from quire.shared.accounts.usage import UsageRow, read_usage
from quire.shared.protocol.broker import Admission
from quire.shared.protocol.charge import LimitReached
from quire.shared.protocol.keys import ACCOUNTS_TAG, AccountKeys, LaneKeys
from quire.shared.redis.clients import command_client
from quire.shared.redis.url import parse_redis_url

# Returns the connection of each model, by its lane.
Models = Callable[[], Mapping[str, Redis]]
# Keys with a label of their own in metrics.
MAX_KEYS = 50


class Keys:
    """The keys of one process, whose accounts it reads from Redis until `close`.

    Raises StartError for a wrong price.
    """

    def __init__(self, settings: GatewaySettings, retry: AccountRetry) -> None:
        self._settings = settings
        self._retry = retry
        self.client = command_client(settings.redis_url, ACCOUNTS_TAG, connections=2)
        self.ring = KeyRing(AccountStore(self.client, "admin API"), retry)
        self._prices = read_prices(settings.prices)
        self._reached = ReachedLimits()
        # A script reaches one slot of a cluster only, so there each model counts the usage of its calls.
        self._is_cluster = parse_redis_url(settings.redis_url).kind == "cluster"

    async def check_start(self) -> None:
        """Raise StartError if no call could be accepted, for lack of a key."""
        await start_check.check_start(self._settings)

    async def close(self) -> None:
        await self.client.aclose()

    def authentication(self) -> Middleware:
        """Return the middleware that finds the caller of an HTTP request."""
        return authentication(self.ring.caller, self._settings.is_open)

    def routes(self, models: Models) -> list[web.RouteDef]:
        """Return the route for the usage of the caller's key."""
        return [web.get("/v1/usage", self._usage_calls(models).own, allow_head=False)]

    def admin_routes(self, models: Models) -> list[web.RouteDef]:
        """Return the routes of the admin API for keys and their usage. The admin API checks its key before a call."""
        return [
            web.get("/admin/usage", self._usage_calls(models).all, allow_head=False),
            *KeyCalls(self.ring, self._retry, self._settings.body_timeout_s).routes(),
        ]

    def _usage_calls(self, models: Models) -> UsageCalls:
        return UsageCalls(self._retry, lambda days, owner: self._usage(days, owner, models()))

    def limits_of(self, model: str) -> KeyLimits:
        """Return what charges the calls of a model."""
        settings = self._settings
        return KeyLimits(
            settings.redis_url,
            model,
            self._prices,
            settings.parking_retention_s if settings.park_on_budget else 0,
            settings.prefix_cache_scope,
        )

    def may_use(self, caller: Caller, model: str) -> bool:
        """Return True if the key of a caller may use a model."""
        return key_policy.may_use(caller, model)

    def check_model(self, caller: Caller, model: str) -> None:
        """Raise ModelNotFound if the key of a caller may not use a model."""
        key_policy.check_model(caller, model)

    def check_reached(self, caller: Caller) -> None:
        """Raise RateLimited if Redis has just refused a call of this caller for a limit that still holds."""
        self._reached.check(caller.accounts)

    def refusal(self, reached: LimitReached, terms: Admission | None) -> ApiError:
        """Return the error for a call that Redis refused, and remember it for the next call."""
        self._reached.note(reached, terms)
        return error_of(reached)

    async def tokens_today(self, models: Mapping[str, Redis]) -> Mapping[tuple[str, str], int]:
        """Return the tokens of today by key and kind, `prompt` or `completion`. Raises RedisError or OSError.

        The keys with fewer tokens than the first MAX_KEYS are together the key `other`. models: as of `Models`.
        """
        rows = await self._usage(1, "", models)
        sums: Counter[str] = Counter()
        for row in rows:
            sums[row.key] += row.prompt + row.completion
        named = {key for key, _ in sums.most_common(MAX_KEYS)}
        found: Counter[tuple[str, str]] = Counter()
        for row in rows:
            key = row.key if row.key in named else "other"
            found[key, "prompt"] += row.prompt
            found[key, "completion"] += row.completion
        return found

    async def _usage(self, days: int, owner: str, models: Mapping[str, Redis]) -> list[UsageRow]:
        """Return the usage of the last days by day, key and model. Raises RedisError or OSError.

        owner: the id of a key; empty for all keys.
        """
        if not self._is_cluster:
            return await read_usage(self.client, AccountKeys().prefix, days, owner)
        lanes = (read_usage(client, LaneKeys(lane).prefix, days, owner) for lane, client in models.items())
        rows = [row for found in await asyncio.gather(*lanes) for row in found]
        return sorted(rows, key=lambda row: (row.date, row.key, row.model))

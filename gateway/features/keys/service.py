"""The API keys of a gateway process: who calls, what a key may use, and the limits of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from redis.asyncio import Redis

from quire.gateway.admission.retry import AccountRetry
from quire.gateway.api.caller import Caller
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.features.keys import key_policy, start_check
from quire.gateway.features.keys.key_limits import KeyLimits, read_prices
from quire.gateway.features.keys.key_ring import KeyRing
from quire.gateway.features.keys.limit_errors import error_of
from quire.gateway.features.keys.reached_limits import ReachedLimits
from quire.gateway.settings import GatewaySettings
from quire.shared.accounts.store import AccountStore
from quire.shared.accounts.usage import UsageRow, read_usage
from quire.shared.protocol.charge import Charge, LimitReached
from quire.shared.protocol.keys import ACCOUNTS_TAG, AccountKeys, LaneKeys
from quire.shared.redis.clients import command_client
from quire.shared.redis.url import parse_redis_url


class Keys:
    """The keys of one process, whose accounts it reads from Redis until `close`.

    Raises StartError for a wrong price.
    """

    def __init__(self, settings: GatewaySettings, retry: AccountRetry) -> None:
        self._settings = settings
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

    def refusal(self, reached: LimitReached, charge: Charge | None) -> ApiError:
        """Return the error for a call that Redis refused, and remember it for the next call."""
        self._reached.note(reached, charge)
        return error_of(reached)

    async def usage(self, days: int, owner: str, models: Mapping[str, Redis]) -> list[UsageRow]:
        """Return the usage of the last days by day, key and model. Raises RedisError or OSError.

        owner: the id of a key; empty for all keys. models: the connection of each model, by its lane.
        """
        if not self._is_cluster:
            return await read_usage(self.client, AccountKeys().prefix, days, owner)
        lanes = (read_usage(client, LaneKeys(lane).prefix, days, owner) for lane, client in models.items())
        rows = [row for found in await asyncio.gather(*lanes) for row in found]
        return sorted(rows, key=lambda row: (row.date, row.key, row.model))

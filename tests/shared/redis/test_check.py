from __future__ import annotations

import pytest

from quire.shared.redis import check
from quire.shared.redis.check import check_redis
from quire.shared.redis.url import BrokerUnavailable


async def test_a_usable_redis_is_named_with_its_version(redis_url: str) -> None:
    name, version = (await check_redis(redis_url)).split()
    assert name in ("Redis", "Valkey")
    assert tuple(int(part) for part in version.split(".")[:2]) >= check.MINIMUM_VERSION


async def test_a_redis_that_is_away_is_refused_with_the_remedy() -> None:
    with pytest.raises(BrokerUnavailable, match=r"no Redis at redis://127\.0\.0\.1:1.*--redis-url"):
        await check_redis("redis://127.0.0.1:1/0")


async def test_an_old_redis_is_refused_with_its_version(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MINIMUM_VERSION", (99, 0))
    with pytest.raises(BrokerUnavailable, match=r"has version \d+\.\d+.*Update it"):
        await check_redis(redis_url)

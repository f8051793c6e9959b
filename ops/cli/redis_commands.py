"""The commands on a Redis that is by default that of `quire serve`: `quire keys`, `usage`, `dead`, `parking` and
`replay`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quire.gateway.features.admin import dead_letters
from quire.gateway.features.keys import api_keys
from quire.gateway.features.keys.key_settings import CreateKey, RestoreKeys
from quire.gateway.features.parking import parked_requests
from quire.ops.cli.settings import DeadSettings, KeysOfStateFolder, ParkedSettings, ReplayedSettings
from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.ops.local.preconditions import find_redis, lock_state_dir, redis_of
from quire.ops.paths import resolve_state_dir
from quire.shared.config.command_line import CommandError
from quire.shared.process.interrupts import raise_at_ctrl_c
from quire.worker.replay import replay_command


def keys(settings: KeysOfStateFolder, environ: Mapping[str, str]) -> int:
    """Carry out a command on API keys, and print its result. Raise CommandError.

    Without --redis-url it uses the Redis of the `quire serve` that runs with the state folder. If none runs, it starts
    the embedded Redis of that folder for the time of the command, so that the first key can be made before the start.
    """
    raise_at_ctrl_c()
    if settings.redis_url:
        return api_keys.run(settings, environ)
    state_dir = resolve_state_dir(settings.state_dir, environ)
    if url := find_redis(state_dir):
        where = f"the Redis of the `quire serve` with the state folder {state_dir} does not answer"
        return api_keys.carry_out(replace(settings, redis_url=url), where, "wait until that `quire serve` is ready")
    return _keys_offline(settings, state_dir)


def _keys_offline(settings: KeysOfStateFolder, state_dir: Path) -> int:
    if not isinstance(settings, (CreateKey, RestoreKeys)) and not (state_dir / "redis").is_dir():
        raise CommandError(
            f"no `quire serve` has run with the state folder {state_dir}, so it holds no keys; pass the --state-dir "
            "(QUIRE_STATE_DIR) of one that has, or the URL of another Redis with --redis-url (QUIRE_REDIS_URL)"
        )
    lock = lock_state_dir(state_dir)
    redis = EmbeddedRedis(state_dir)
    try:
        redis.start()
        print(f"no `quire serve` runs: using the Redis data of the state folder {state_dir}", file=sys.stderr)
        where = f"the Redis of the state folder {state_dir} does not answer"
        return api_keys.carry_out(replace(settings, redis_url=redis.url), where, f"see {redis.log_path}")
    finally:
        redis.stop()
        lock.close()


def dead(settings: DeadSettings, environ: Mapping[str, str]) -> int:
    """Carry out an action on the dead-letter queue, and print its result. Raise CommandError.

    Without --redis-url it uses the Redis of the `quire serve` that runs with the state folder, else DEFAULT_REDIS_URL.
    """
    raise_at_ctrl_c()
    if settings.redis_url:
        return dead_letters.run(settings, environ)
    redis = redis_of(resolve_state_dir(settings.state_dir, environ))
    return dead_letters.carry_out(replace(settings, redis_url=redis.url), redis.where, redis.remedy)


def parking(settings: ParkedSettings, environ: Mapping[str, str]) -> int:
    """Carry out an action on parked requests, and print its result. Raise CommandError.

    Without --redis-url it uses the Redis of the `quire serve` that runs with the state folder, else DEFAULT_REDIS_URL.
    """
    raise_at_ctrl_c()
    if settings.redis_url:
        return parked_requests.run(settings, environ)
    redis = redis_of(resolve_state_dir(settings.state_dir, environ))
    return parked_requests.carry_out(replace(settings, redis_url=redis.url), redis.where, redis.remedy)


def replay(settings: ReplayedSettings, environ: Mapping[str, str]) -> int:
    """Replay a request, and print the result. Raise CommandError.

    Without --redis-url it uses the Redis of the `quire serve` that runs with the state folder, else DEFAULT_REDIS_URL.
    """
    if settings.redis_url:
        return replay_command.run(settings)
    redis = redis_of(resolve_state_dir(settings.state_dir, environ))
    return replay_command.carry_out(replace(settings, redis_url=redis.url), redis.where, redis.remedy)

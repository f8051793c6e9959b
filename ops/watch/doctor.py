"""`quire doctor`: checks this machine and its Redis, and names a remedy for each fault."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from quire.ops.local.embedded_redis import find_redis_server
from quire.ops.local.preconditions import find_redis
from quire.ops.paths import resolve_state_dir
from quire.ops.terminal import GREEN, RED, YELLOW, styled
from quire.ops.watch import machine
from quire.ops.watch.checks import Check, Verdict, found
from quire.ops.watch.commands import DoctorSettings
from quire.ops.watch.redis_health import checks_of
from quire.shared.config.command_line import CommandError
from quire.shared.config.settings import wrap
from quire.shared.process.interrupts import raise_at_ctrl_c
from quire.shared.redis.clients import command_client
from quire.shared.redis.url import BrokerUnavailable, redact

STYLES = {Verdict.OK: GREEN, Verdict.WARNING: YELLOW, Verdict.FAILED: RED}


def doctor(settings: DoctorSettings, environ: Mapping[str, str]) -> int:
    """Print the checks. Return 1 if one has failed."""
    raise_at_ctrl_c()
    state_dir = resolve_state_dir(settings.state_dir, environ)
    checks = [*machine.checks(settings.model, settings.host, settings.port, state_dir), *_redis(settings, state_dir)]
    if settings.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        print("\n".join(map(shown, checks)))
    return int(any(check.verdict == Verdict.FAILED for check in checks))


def shown(check: Check) -> str:
    """Return a check as lines for people."""
    head = f"{check.verdict:<8} {check.name:<14} "
    said = wrap(check.seen, " " * len(head), head)
    said = said.replace(check.verdict, styled(check.verdict, STYLES[check.verdict]), 1)
    return said + ("\n" + wrap(check.remedy, " " * len(head), " " * (len(head) - 2) + "→ ") if check.remedy else "")


def _redis(settings: DoctorSettings, state_dir: Path) -> list[Check]:
    """Check the Redis of --redis-url, or that of the running `quire serve`; without one, the server it would start."""
    url = settings.redis_url or find_redis(state_dir)
    if not url:
        try:
            program = find_redis_server()
        except CommandError as error:
            what, _, remedy = str(error).partition("; ")
            return [found("redis", f"none runs for {state_dir}, and there is {what}", remedy, Verdict.FAILED)]
        return [found("redis", f"none runs for {state_dir}: not checked; `quire serve` would start {program}")]
    try:
        info, difference_s = asyncio.run(_ask(url))
    except (RedisError, OSError, BrokerUnavailable) as error:
        remedy = "start it, or pass another --redis-url (QUIRE_REDIS_URL)"
        return [found("redis", f"{redact(url)} does not answer: {error}", remedy, Verdict.FAILED)]
    return checks_of(info, difference_s, is_local=url.startswith("unix:"))


async def _ask(url: str) -> tuple[dict[str, Any], float]:
    """Return what INFO says, and by how many seconds the clock of this machine is before that of Redis."""
    client = command_client(url, connections=1)
    try:
        info: dict[str, Any] = await client.info("everything")
        before = time.time()
        seconds, micros = await client.time()
        return info, (before + time.time()) / 2 - seconds - micros / 1e6
    finally:
        await client.aclose()

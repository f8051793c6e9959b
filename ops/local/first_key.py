"""The first API key of a `quire serve` that requires keys: made at the start and shown once, on a terminal only."""

from __future__ import annotations

import asyncio
import shlex
from typing import TextIO

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.shared.config.command_line import CommandError
from quire.shared.process.errors import StartError


def first_key(gateway: GatewaySettings, serve: ServeSettings, redis_url: str, output: TextIO) -> str:
    """Make an API key if calls need a key and Redis holds none. Return its secret, or an empty text.

    output: where the caller shows the secret. If it is no terminal but a file or a journal, no key is made.
    Raise CommandError.
    """
    from quire.gateway.features.keys.start_check import has_keys, make_first_key, needs_key, no_key

    try:
        if not needs_key(gateway) or asyncio.run(has_keys(redis_url)):
            return ""
        if not output.isatty():
            raise no_key(gateway, _create(serve))
        return asyncio.run(make_first_key(redis_url))
    except StartError as error:
        raise CommandError(str(error)) from error


def _create(serve: ServeSettings) -> str:
    """Return how to make a key while this `quire serve` does not run."""
    if serve.redis_url:
        return "`quire keys create` and the same --redis-url"
    return f"`quire keys create{f' --state-dir {shlex.quote(serve.state_dir)}' if serve.state_dir else ''}`"

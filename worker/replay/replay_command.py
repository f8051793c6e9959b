"""Replays one request: reads it from Redis, builds an engine as a worker does, and prints what differs."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import asdict, replace
from typing import Any

from redis.exceptions import RedisError

from quire.shared.model.model_argument import resolve_model
from quire.shared.model.naming import served_name
from quire.shared.process.errors import StartError
from quire.shared.process.interrupts import raise_at_ctrl_c
from quire.shared.protocol.broker import Broker
from quire.shared.redis.clients import command_client
from quire.shared.redis.url import BrokerUnavailable, redact
from quire.shared.telemetry.logs import setup_logging
from quire.worker.interpreter import without_collections
from quire.worker.lean_torch import import_torch
from quire.worker.replay.commands import ReplaySettings
from quire.worker.replay.logged_request import CannotReplay, LoggedRequest, read_logged

# The id of a request: that of its call, with a number for each further prompt. Answers put the name of an API before.
_ID = re.compile(r"(?:[a-z]+[-_])?([0-9a-f]{32}(?:-[0-9]+)?)", re.ASCII)


def run(settings: ReplaySettings) -> int:
    """Replay the request at `settings.redis_url`. Raises CannotReplay."""
    where = f"no Redis at {redact(settings.redis_url)}"
    return carry_out(settings, where, "pass another --redis-url (QUIRE_REDIS_URL)")


def carry_out(settings: ReplaySettings, where: str, remedy: str) -> int:
    """Like `run`. `where` and `remedy` begin and end the error for a Redis that does not answer."""
    raise_at_ctrl_c()
    match = _ID.fullmatch(settings.id)
    if not match:
        raise CannotReplay(f"{settings.id[:80]!r} is no id of a request; give the id of an answer")
    try:
        settings = replace(settings, model=resolve_model(settings.model))
        name = served_name(settings.model, settings.served_model_name)
        logged = asyncio.run(_read(settings.redis_url, name, match[1]))
        started = time.perf_counter()
        found = _compute(settings, name, logged)
    except BrokerUnavailable as error:
        raise CannotReplay(str(error)) from error
    except (RedisError, OSError) as error:
        raise CannotReplay(f"{where}: {str(error).rstrip('.')}; {remedy}") from error
    except StartError as error:
        raise CannotReplay(str(error)) from error
    result = {"id": match[1], "model": name, "state": logged.state, **found}
    result["seconds"] = round(time.perf_counter() - started, 3)
    print(json.dumps(result) if settings.json else _shown(result))
    return 0 if result["exact"] else 1


async def _read(url: str, lane: str, request_id: str) -> LoggedRequest:
    """Raises CannotReplay, RedisError, OSError."""
    broker = Broker(command_client(url, lane, connections=2), lane)
    try:
        return await read_logged(broker, request_id)
    finally:
        await broker.client.aclose()


def _compute(settings: ReplaySettings, name: str, logged: LoggedRequest) -> dict[str, Any]:
    """Build the engine, and replay each choice. Raises CannotReplay, StartError."""
    setup_logging("replay", settings.log_level, settings.log_format)
    with without_collections():
        import_torch()
        from quire.worker.build import build_engine
        from quire.worker.engine.features.replay import Replay
        from quire.worker.engine.limits import RequestRefused
    engine = build_engine(settings, name)
    model = engine.runner.model
    try:
        if logged.weights and logged.weights != model.weights_digest:
            raise CannotReplay(
                f"the weights of {settings.model} have the digest {model.weights_digest}, and those of the worker that "
                f"ran the request {logged.weights}; give its --model and --quantization"
            )
        choices = []
        for choice in logged.deltas:
            replay = Replay(
                engine, logged.request, choice, logged.output(choice), logged.logprobs(choice), logged.files
            )
            replay.run()
            difference = asdict(replay.difference) if replay.difference else None
            choices.append(
                {
                    "index": choice,
                    "tokens": len(replay.output),
                    "compared": replay.num_compared,
                    "equal": replay.num_equal,
                    "difference": difference,
                    "logprob_error": replay.logprob_error,
                }
            )
    except RequestRefused as error:
        raise CannotReplay(f"{error} (--lora NAME=FOLDER gives an adapter)") from error
    finally:
        model.close()
    return {
        "exact": all(choice["difference"] is None for choice in choices),
        "weights": {"here": model.weights_digest, "logged": logged.weights or None},
        "choices": choices,
    }


def _shown(result: dict[str, Any]) -> str:
    """Return the result for people."""
    ends = "has ended" if result["state"] == "done" else f"is {result['state']}"
    lines = [f"request {result['id']} of {result['model']} {ends}: {'byte-exact' if result['exact'] else 'differs'}"]
    for choice in result["choices"]:
        line = f"choice {choice['index']}: {choice['equal']} of {choice['compared']} tokens are equal"
        if found := choice["difference"]:
            line += (
                f"; the first that differs is token {found['position']}: logged {found['logged']} (log-probability "
                f"{found['logged_logprob']:.4f}), chosen {found['chosen']} ({found['chosen_logprob']:.4f})"
            )
        if choice["logprob_error"] is not None:
            line += f"; log-probabilities differ by at most {choice['logprob_error']:.3g}"
        lines.append(line)
    if not result["weights"]["logged"]:
        lines.append("the weights of the worker that ran the request are unknown: it is gone")
    return "\n".join(lines)

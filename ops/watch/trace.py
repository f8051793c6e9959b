"""`quire trace`: the life of one request as Redis has it, and what it waited for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from redis.exceptions import RedisError

from quire.ops.terminal import BOLD, DIM, styled
from quire.ops.watch.commands import TraceSettings
from quire.ops.watch.redis_reads import brokers, place_of, run_on
from quire.ops.watch.words import duration
from quire.shared.config.command_line import CommandError
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.keys import GROUP, WORKER_TTL_S
from quire.shared.protocol.messages import MessageError, decode_items
from quire.shared.protocol.states import RequestState

# The id of a request: that of its call, with a number for each further prompt. Answers put the name of an API before.
_ID = re.compile(r"(?:[a-z]+[-_])?([0-9a-f]{32}(?:-[0-9]+)?)", re.ASCII)
# A line of the field `history`. The first one may be cut.
_EVENT = re.compile(r"([0-9]{13}) (claimed|released|parked|unparked) ([0-9]+) (.*)", re.ASCII)
_FIELDS = (
    *("state", "outcome", "class", "created", "first_at", "finished", "history", "emitted", "user", "cost", "owner"),
    *("deaths", "waits", "cancel", "affinity", "queue", "entry"),
)
# How the time of a request is divided, for people.
PHASES = {
    "queue": "in the queue",
    "prompt": "computing the prompt",
    "answer": "writing the answer",
    "parked": "parked",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request. at_ms: Redis time. tokens: of the answer, so far."""

    at_ms: int
    event: str
    tokens: int
    worker: str = ""
    note: str = ""


@dataclass(slots=True)
class Life:
    """A request. times_ms: by PHASES, up to now or to its end. waits_for: empty once it has ended."""

    id: str
    model: str
    state: str
    outcome: str
    priority_class: str
    prompt_tokens: int
    max_tokens: int
    tokens: int
    steps: int
    recoveries: int = 0
    events: list[Event] = field(default_factory=list)
    times_ms: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    waits_for: str = ""
    detail: str = ""


def trace(settings: TraceSettings, environ: Mapping[str, str]) -> int:
    """Print the life of a request. Raise CommandError."""
    match = _ID.fullmatch(settings.id)
    if not match:
        what = f"{settings.id[:80]!r} is no id of a request" if settings.id else "the id of a request is missing"
        raise CommandError(f"{what}; give the id of an answer, or the header X-Quire-Request-Id")
    place = place_of(settings, environ)

    async def find() -> Life | None:
        async with brokers(place.url, settings.served_model_name) as lanes:
            for broker in lanes:
                if life := await read_life(broker, match[1]):
                    return life
            return None

    life = run_on(place, find)
    if life is None:
        raise CommandError(
            f"no model has the request {match[1]}; a request is known until ten minutes after its end. Check the id, "
            "and name the model with --served-model-name if no worker of it has run for an hour"
        )
    print(json.dumps(asdict(life), indent=1) if settings.json else "\n".join(shown(life)))
    return 0


async def read_life(broker: Broker, request_id: str) -> Life | None:
    """Return the life of a request; None if the lane does not know it. Costs two round trips."""
    keys, pipe = broker.keys, broker.client.pipeline(transaction=False)
    pipe.hmget(keys.request(request_id), *_FIELDS)
    pipe.xlen(keys.output(request_id))
    pipe.xrevrange(keys.output(request_id), count=1)
    pipe.time()
    values, steps, last, (seconds, micros) = await pipe.execute()
    fields = {name: text(value) for name, value in zip(_FIELDS, values, strict=True) if value is not None}
    if "state" not in fields:
        return None
    prompt = _number(fields.get("user", "").partition(" ")[0])
    life = Life(
        id=request_id,
        model=keys.lane,
        state=fields["state"],
        outcome=fields.get("outcome", ""),
        priority_class=fields.get("class", ""),
        prompt_tokens=prompt,
        max_tokens=max(0, _number(fields.get("cost")) - prompt),
        tokens=_number(fields.get("emitted")),
        steps=steps,
        detail=_detail(last),
    )
    now_ms = 1000 * seconds + micros // 1000
    _tell(life, fields, now_ms)
    if life.state != RequestState.DONE:
        life.waits_for = await _waits_for(broker, life, fields, now_ms)
    return life


def _tell(life: Life, fields: Mapping[str, str], now_ms: int) -> None:
    """Fill in events, times and recoveries."""
    created, first, end = (_number(fields.get(name)) for name in ("created", "first_at", "finished"))
    known = [match for line in fields.get("history", "").splitlines() if (match := _EVENT.fullmatch(line))]
    told = [Event(int(match[1]), match[2], int(match[3]), match[4]) for match in known]
    if first:
        told.append(Event(first, "first token", 0))
    told.sort(key=lambda event: (event.at_ms, event.tokens))  # several may have happened within a millisecond
    life.events = [Event(created, "accepted", 0, note=_terms(life))]
    phase, since, worker = "queue", created, ""
    for event in told:
        note = ""
        life.times_ms[phase] += event.at_ms - since
        if event.event == "claimed":
            if phase in ("prompt", "answer"):
                life.recoveries += 1
                note = f"recovery: {worker or 'its worker'} had stopped renewing its lease"
            elif len(life.events) == 1:
                note = f"after {duration((event.at_ms - created) / 1000)}" + _placed(
                    fields.get("affinity", ""), event.worker
                )
            worker = event.worker
            phase = "answer" if event.tokens else "prompt"
        elif event.event == "first token":
            note, phase = f"after {duration((event.at_ms - since) / 1000)} for the prompt", "answer"
        else:
            phase = {"released": "queue", "parked": "parked", "unparked": "queue"}[event.event]
            note = "its worker stopped, and handed it back" if event.event == "released" else ""
        life.events.append(Event(event.at_ms, event.event, event.tokens, event.worker, note))
        since = event.at_ms
    life.times_ms[phase] += (end or now_ms) - since
    if end:
        life.events.append(Event(end, "ended", life.tokens, note=": ".join(filter(None, (life.outcome, life.detail)))))


def _terms(life: Life) -> str:
    return f"class {life.priority_class}, {life.prompt_tokens} prompt tokens, at most {life.max_tokens} more"


def _placed(affinity: str, worker: str) -> str:
    """Return how the request came to the worker that claimed it first, if a worker held a prefix of it."""
    what, _, holder = (*affinity.split(" ", 2), "", "")[:3]
    if not holder:
        return ""
    if what == "left" and holder == worker:
        return ", as the holder of a prefix of it"
    return f", {holder} holds a prefix of it and " + ("was busy" if what == "busy" else "did not take it in time")


async def _waits_for(broker: Broker, life: Life, fields: Mapping[str, str], now_ms: int) -> str:
    """Return what a request that has not ended waits for."""
    keys, owner, queue = broker.keys, fields.get("owner", ""), fields.get("queue", "")
    pipe = broker.client.pipeline(transaction=False)
    pipe.zcount(keys.workers, now_ms - 1000 * WORKER_TTL_S, "+inf")
    pipe.hget(keys.load, "requests")
    pipe.zscore(keys.parked, life.id)
    pipe.xpending_range(keys.queue(queue), GROUP, fields.get("entry", "-"), fields.get("entry", "+"), 1)
    # XPENDING may fail: a queue without requests has no group.
    *replies, pending = await pipe.execute(raise_on_error=False)
    if error := next((reply for reply in replies if isinstance(reply, RedisError)), None):
        raise error
    workers, waiting, until_ms = replies
    if life.state == RequestState.PARKED:
        left = duration((float(until_ms or now_ms) - now_ms) / 1000)
        return f"`quire parking unpark --id {life.id}`; it ends in {left}"
    if not workers:
        return f"a worker: none of {life.model} has sent a heartbeat for {WORKER_TTL_S} s"
    if life.state == RequestState.QUEUED:
        what, entry, holder = (*fields.get("affinity", "").split(" ", 2), "", "")[:3]
        if what == "left" and entry == fields.get("entry"):
            return f"the worker {holder}, which holds a prefix of it"
        return f"a free row: {_number(text(waiting or b''))} requests wait for {workers} workers"
    if fields.get("waits"):
        return f"{owner} to have nothing else to run: two workers have died with this request"
    idle_s = pending[0]["time_since_delivered"] / 1000 if isinstance(pending, list) and pending else 0.0
    if idle_s > WORKER_TTL_S:
        return f"a recovery: {owner} has not renewed its lease for {duration(idle_s)}"
    if fields.get("cancel"):
        return f"{owner} to end it: it is cancelled"
    return f"its next token from {owner}" if life.tokens else f"its first token: {owner} computes the prompt"


def shown(life: Life) -> list[str]:
    """Return the life of a request as lines for people."""
    state = f"ended, {life.outcome}" if life.outcome else life.state
    accepted = datetime.fromtimestamp(life.events[0].at_ms / 1000, UTC).isoformat(" ", "seconds").replace("+00:00", "Z")
    said = [styled(f"{life.id}  {life.model}  {state}", BOLD), styled(f"accepted {accepted}", DIM)]
    for event in life.events:
        after = f"+{(event.at_ms - life.events[0].at_ms) / 1000:.3f} s"
        tokens = f"{event.tokens} tokens" if event.tokens else ""
        parts = ", ".join(filter(None, (event.worker and f"by {event.worker}", tokens, event.note)))
        said.append(f"{after:>12}  {event.event:<12} {parts}".rstrip())
    total = sum(life.times_ms.values())
    times = [f"{duration(ms / 1000)} {PHASES[name]}" for name, ms in life.times_ms.items() if ms]
    if times:
        said += ["", f"{duration(total / 1000)} in all: {', '.join(times)}."]
    answer_s = life.times_ms["answer"] / 1000
    if life.tokens > 1 and answer_s:
        rate = f"{(life.tokens - 1) / answer_s:.1f} tokens/s after the first"
        said.append(f"{life.tokens} tokens in {life.steps} steps, {rate}.")
    if life.recoveries:
        often = "once" if life.recoveries == 1 else f"{life.recoveries} times"
        said.append(f"It was recovered {often}: each time its lease had to run out first (--lease-s, 3 s by default).")
    said.append(f"It waits for {life.waits_for}." if life.waits_for else _most(life, total))
    return said


def _most(life: Life, total_ms: int) -> str:
    name, ms = max(life.times_ms.items(), key=lambda time: time[1])
    share = 100 * ms / total_ms if total_ms else 0
    return f"Most of it, {share:.0f} %, {PHASES[name]}: docs/how-to/slow-request.md says what to do."


def _detail(last: Any) -> str:
    """Return the detail of the outcome in the last entry of an output log."""
    try:
        items = [item for _, values in last for item in decode_items(values[b"item"])]
    except (MessageError, KeyError):
        return ""
    return items[-1].outcome.detail if items and items[-1].outcome else ""


def _number(value: str | None) -> int:
    return int(value) if value and value.isdecimal() and len(value) < 16 else 0

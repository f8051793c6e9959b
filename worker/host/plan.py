"""Decides which models of a host get a worker, and which lose theirs. Knows neither Redis nor processes.

The model whose oldest request has waited longest comes first. A free place is used first, then the place of the model
that has been idle longest. Models with open requests keep their workers for a time slice. After it a model gives its
place up if others wait, the one that was loaded longest ago first. Its worker hands the requests back to their queue,
and they continue later.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto


class Phase(Enum):
    """The phase of the worker of a model."""

    NONE = auto()
    LOADING = auto()
    READY = auto()
    STOPPING = auto()


@dataclass(slots=True)
class ModelDemand:
    """A model as the plan sees it. Times are seconds of one monotonic clock.

    size: bytes of memory. is_idle: no request is open. wanted_since: time since which requests wait for a worker; None
    if none do, or if they must wait for a retry. ready_at: start of the service of its worker. used_at: end of its last
    open request.
    """

    name: str
    size: int
    phase: Phase = Phase.NONE
    is_idle: bool = True
    wanted_since: float | None = None
    ready_at: float = 0.0
    used_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Room:
    """The limits of a host. most: workers. size: bytes for their models. slice_s, idle_s: see --models-slice-s and
    --models-idle-s."""

    most: int
    size: int
    slice_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Eviction:
    """A worker to stop. why: `idle` (--models-idle-s), `room` (for another model), or `slice` (its time is over).

    successor: the model that gets its place; empty for `idle`.
    """

    name: str
    why: str
    successor: str = ""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Models to load, and workers to stop."""

    load: tuple[str, ...] = ()
    evict: tuple[Eviction, ...] = ()


def make_plan(models: Collection[ModelDemand], room: Room, now: float) -> LoadPlan:
    """Return what to do now. Models are loaded in the order of their waiting time; none overtakes another."""
    held = [model for model in models if model.phase is not Phase.NONE]
    wanted = sorted(
        (model for model in models if model.phase is Phase.NONE and model.wanted_since is not None),
        key=lambda model: (model.wanted_since, model.name),
    )
    load: list[str] = []
    for model in wanted:
        if _fits(model, held, room):
            load.append(model.name)
            held.append(model)
            continue
        return LoadPlan(tuple(load), _make_room(model, held, room, now))
    ready = [model for model in held if model.phase is Phase.READY and model.is_idle]
    expired = [model for model in ready if room.idle_s and now - model.used_at >= room.idle_s]
    return LoadPlan(tuple(load), tuple(Eviction(model.name, "idle") for model in expired))


def _fits(model: ModelDemand, held: Collection[ModelDemand], room: Room) -> bool:
    return len(held) < room.most and sum(other.size for other in held) + model.size <= room.size


def _make_room(model: ModelDemand, held: Collection[ModelDemand], room: Room, now: float) -> tuple[Eviction, ...]:
    """Return the fewest evictions after which a model fits; none if it cannot fit yet, or will without any."""
    left = [other for other in held if other.phase is not Phase.STOPPING]
    ready = [other for other in left if other.phase is Phase.READY]
    victims = [Eviction(other.name, "room", model.name) for other in sorted(ready, key=_last_used) if other.is_idle]
    if model.wanted_since is not None and now - model.wanted_since >= room.slice_s:
        served = [other for other in ready if not other.is_idle and now - other.ready_at >= room.slice_s]
        served.sort(key=lambda other: other.ready_at)
        victims += [Eviction(other.name, "slice", model.name) for other in served]
    chosen: list[Eviction] = []
    while not _fits(model, left, room):
        if not victims:
            return ()
        chosen.append(victims.pop(0))
        left = [other for other in left if other.name != chosen[-1].name]
    return tuple(chosen)


def _last_used(model: ModelDemand) -> tuple[float, str]:
    return model.used_at, model.name

"""The card of a model host: the models of its folder, and the state of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quire.shared.config.validators import Integer, InvalidValue, Text, checked, fixed_array, read_map, short_array
from quire.shared.model.naming import is_served_name
from quire.shared.protocol.messages.codec import VERSION, as_map, decode, pack

# Models of one host, and the longest reason why one cannot be loaded.
MAX_HOSTED = 1024
MAX_REASON = 1000
MAX_HOST_CARD_BYTES = 2 * 1024 * 1024
_MAX_TIME_MS = 2**53


class HostState(StrEnum):
    """The state of a model at a host. If hosts differ, gateways use the state that is first in this list."""

    #: A worker of the host serves the model.
    LOADED = "loaded"
    #: A worker of the host reads the weights.
    LOADING = "loading"
    #: The host loads the model as soon as its queue has a request.
    NOT_LOADED = "not_loaded"
    #: The model could not be loaded; the host tries again later. HostedModel.reason says why.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model of a host. reason: of FAILED. used_ms: Redis time of its last open request; 0: none since the start."""

    name: str
    state: HostState
    reason: str = ""
    used_ms: int = 0


def _models(name: str, value: Any) -> tuple[HostedModel, ...]:
    read_reason, read_time = Text(0, MAX_REASON), Integer(0, _MAX_TIME_MS)
    models = []
    for entry in short_array(name, value, MAX_HOSTED):
        model, state, reason, used_ms = fixed_array(name, entry, 4)
        if type(model) is not str or not is_served_name(model):
            raise InvalidValue(name, "has a name that no model can have")
        if state not in tuple(HostState):
            raise InvalidValue(name, "has an unknown state")
        models.append(HostedModel(model, HostState(state), read_reason(name, reason), read_time(name, used_ms)))
    return tuple(models)


@dataclass(frozen=True, slots=True)
class HostCard:
    """The models of a host. home: identity of its process, as of a worker (`worker/queue/leases.py`)."""

    home: str = checked(Text(0, 512))
    models: tuple[HostedModel, ...] = checked(_models)
    version: int = checked(Integer(VERSION, VERSION), default=VERSION)

    def encode(self) -> bytes:
        """Return the card as a message."""
        models = [[model.name, str(model.state), model.reason, model.used_ms] for model in self.models]
        return pack(as_map(self) | {"models": models})

    @classmethod
    def decode(cls, data: bytes) -> HostCard:
        """Read a message. Raise MessageError."""
        return decode(data, MAX_HOST_CARD_BYTES, lambda value: read_map(cls, "host card", value))


def by_name(cards: Iterable[HostCard]) -> dict[str, HostedModel]:
    """Return each model of several hosts once, with its first state in the order of HostState."""
    order = {state: place for place, state in enumerate(HostState)}
    found: dict[str, HostedModel] = {}
    for model in (model for card in cards for model in card.models):
        known = found.get(model.name)
        if known is None or order[model.state] < order[known.state]:
            found[model.name] = model
    return found

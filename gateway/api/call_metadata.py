"""What is noted about a call beside its requests, so that any gateway can render its answer again.

It travels with each request of the call, as one msgpack array that is decoded strictly.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import msgpack

from quire.shared.messages import MAX_PROMPT_TOKENS, MessageError, unpack
from quire.shared.sampling_params import MAX_CHOICES, MAX_STOP_LENGTH, MAX_STOP_STRINGS

VERSION = 1
DIALECTS = ("chat", "completion")
# Bounds of what is decoded; a character has at most four bytes.
MAX_BYTES = 4 * MAX_STOP_STRINGS * MAX_STOP_LENGTH + 4096
MAX_REQUESTS = 1024
MAX_CREATED = 2**40


@dataclass(frozen=True, slots=True)
class CallMetadata:
    """One call, with a request for each prompt. `prompt_tokens`: of all of them. `is_background`: without a client it
    runs on."""

    dialect: str
    created: int
    n: int
    include_usage: bool
    stop: tuple[str, ...]
    prompt_tokens: int
    requests: int
    is_background: bool

    @property
    def choices(self) -> int:
        return self.requests * self.n

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb((VERSION, *_values(self)), use_bin_type=True)
        return packed

    @classmethod
    def decode(cls, data: bytes) -> CallMetadata:
        """Raises MessageError."""
        value = unpack(data, MAX_BYTES)
        if type(value) is not list or len(value) != 9 or value[0] != VERSION:
            raise MessageError(f"what is noted about a call must be an array of 9 with version {VERSION}")
        _, dialect, created, n, include_usage, stop, prompt_tokens, requests, is_background = value
        if dialect not in DIALECTS:
            raise MessageError(f"dialect must be one of {', '.join(DIALECTS)}, not {dialect!r:.80}")
        if type(stop) is not list or len(stop) > MAX_STOP_STRINGS:
            raise MessageError(f"stop must be a list of at most {MAX_STOP_STRINGS} strings")
        if any(type(string) is not str or not 1 <= len(string) <= MAX_STOP_LENGTH for string in stop):
            raise MessageError(f"stop must have strings of 1 to {MAX_STOP_LENGTH} characters")
        return cls(
            dialect,
            _integer("created", created, 0, MAX_CREATED),
            _integer("n", n, 1, MAX_CHOICES),
            _flag("include_usage", include_usage),
            tuple(stop),
            _integer("prompt_tokens", prompt_tokens, 0, MAX_REQUESTS * MAX_PROMPT_TOKENS),
            _integer("requests", requests, 1, MAX_REQUESTS),
            _flag("is_background", is_background),
        )


_values = attrgetter(*(field.name for field in fields(CallMetadata)))


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise MessageError(f"{name} must be an integer from {low} to {high}, not {value!r:.80}")
    return value


def _flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise MessageError(f"{name} must be true or false, not {value!r:.80}")
    return value

"""The metadata of a call: with it and the output of the requests any gateway can render the answer.

Each request of the call carries this metadata as one msgpack array, which gateways read strictly.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import msgpack

from quire.shared.messages import MAX_PROMPT_TOKENS, decode
from quire.shared.sampling_params import MAX_CHOICES, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from quire.shared.validators import Flag, Integer, OneOf, Texts, checked, fixed_array

VERSION = 1
DIALECTS = ("chat", "completion")
# The largest size of a message; a character has at most four bytes.
MAX_BYTES = 4 * MAX_STOP_STRINGS * MAX_STOP_LENGTH + 4096
MAX_REQUESTS = 1024


def request_id(call_id: str, index: int) -> str:
    """The id of a call's request for the prompt `index`; the first request has the id of the call."""
    return f"{call_id}-{index}" if index else call_id


@dataclass(frozen=True, slots=True)
class CallMetadata:
    """One call, with a request for each prompt.

    created: unix seconds. n: choices per prompt. prompt_tokens: of all prompts together.
    is_background: the call runs on without a client.
    """

    dialect: str = checked(OneOf(DIALECTS))
    created: int = checked(Integer(0, 2**40))
    n: int = checked(Integer(1, MAX_CHOICES))
    include_usage: bool = checked(Flag())
    stop: tuple[str, ...] = checked(Texts(MAX_STOP_STRINGS, 1, MAX_STOP_LENGTH))
    prompt_tokens: int = checked(Integer(0, MAX_REQUESTS * MAX_PROMPT_TOKENS))
    requests: int = checked(Integer(1, MAX_REQUESTS))
    is_background: bool = checked(Flag())
    include_stop_str_in_output: bool = checked(Flag(), default=False)

    @property
    def choices(self) -> int:
        """Choices of all prompts together."""
        return self.requests * self.n

    def encode(self) -> bytes:
        """The metadata as a message: an array of the version and the fields."""
        packed: bytes = msgpack.packb((VERSION, *_values(self)), use_bin_type=True)
        return packed

    @classmethod
    def decode(cls, data: bytes) -> CallMetadata:
        """Reads a message. Raises MessageError."""
        return decode(data, MAX_BYTES, cls._read)

    @classmethod
    def _read(cls, value: Any) -> CallMetadata:
        version, *values = fixed_array("call metadata", value, 1 + len(_FIELDS))
        _version("version", version)
        return cls(*(one.metadata["check"](one.name, field) for one, field in zip(_FIELDS, values, strict=True)))


_FIELDS = fields(CallMetadata)
_values = attrgetter(*(one.name for one in _FIELDS))
_version = Integer(VERSION, VERSION)

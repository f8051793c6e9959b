"""msgpack as messages use it: without extension types, and of bounded size."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

import msgpack

from quire.shared.config.validators import InvalidValue

T = TypeVar("T")

# The version of requests, worker cards and step items. `shared/protocol/broker/scripts.py` puts it
# into `_prelude.lua`.
VERSION = 6


class MessageError(ValueError):
    """A message does not follow the protocol. The text of the error names the wrong field."""


def unpack(data: bytes, limit: int) -> Any:
    """Return the msgpack object in at most `limit` bytes. Raise MessageError."""
    if len(data) > limit:
        raise MessageError(f"a message of {len(data)} bytes is over the limit of {limit}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=True)
    except Exception as error:  # the library has no common base class for its errors
        raise MessageError(f"not msgpack: {error}") from error


def decode(data: bytes, limit: int, read: Callable[[Any], T]) -> T:
    """Apply `read` to the msgpack object in at most `limit` bytes. Raise MessageError."""
    value = unpack(data, limit)
    try:
        return read(value)
    except InvalidValue as error:
        raise MessageError(str(error)) from error


def new_packer() -> Any:
    """Return a packer of messages, for one thread."""
    return msgpack.Packer(use_bin_type=True)


class _Packers(threading.local):
    """One packer per thread: to make one costs more than to use it."""

    def __init__(self) -> None:
        self.packer = new_packer()


_packers = _Packers()


def pack(value: Any) -> bytes:
    """Return a value as a msgpack object. Tuples become arrays."""
    packed: bytes = _packers.packer.pack(value)
    return packed


def as_map(message: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; a nested dataclass stays as it is."""
    return {field.name: getattr(message, field.name) for field in fields(message)}


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian unsigned 32-bit integers: every machine that Quire runs on is little-endian."""
    return array("I", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> tuple[int, ...]:
    """Reverse `pack_token_ids`."""
    ids = array("I")
    ids.frombytes(data)
    return tuple(ids)

"""Reads the body of a call: strict JSON in strict UTF-8, with bounds on its size, its time and its number of values.

Standard parsers accept NaN, keys that occur twice, UTF-16, lone surrogates and deep nesting. `parse_object` refuses all
of these, because each would fail later.

The event loop stands still while a body is parsed. A text of 4 MiB takes some milliseconds, a list of a million empty
lists a hundred times as long. So values are counted before the body is parsed.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn, cast

from aiohttp import web

from quire.gateway.api.body_budget import hold_body
from quire.gateway.errors.api_errors import ApiError, BodyTimeout, BodyTooLarge, InvalidRequest, UnsupportedMedia

# A body may have LEAST_MAX_VALUES values, or one per BYTES_PER_VALUE bytes of the size limit if that is more.
LEAST_MAX_VALUES = 1 << 16
BYTES_PER_VALUE = 16
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")

# The body of a request that was read to find its model, or the error of the reading.
BODY = web.RequestKey("body", object)


async def read_object(request: web.Request, limit: int, timeout_s: float) -> dict[str, Any]:
    """Return the JSON object in the body of `request`, which is read at the first call only. Raises ApiError."""
    if (parsed := request.get(BODY)) is not None:
        if isinstance(parsed, ApiError):
            raise parsed
        return cast("dict[str, Any]", parsed)
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("A body with a Content-Encoding is not accepted; send plain JSON.")
    if request.content_type != "application/json":
        raise UnsupportedMedia("The body must be JSON; send it with the header `Content-Type: application/json`.")
    length = request.content_length
    if length is not None and length > limit:
        raise _too_large(limit)
    await hold_body(request, limit if length is None else length, timeout_s)
    return parse_object(await _read(request, limit, timeout_s), max_values(limit))


def max_values(max_body_bytes: int) -> int:
    """Return the largest number of values in a body."""
    return max(LEAST_MAX_VALUES, max_body_bytes // BYTES_PER_VALUE)


async def _read(request: web.Request, limit: int, timeout_s: float) -> bytes:
    data = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                data += chunk
                if len(data) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {timeout_s:g} seconds.") from None
    except web.HTTPException:
        raise
    except (ValueError, web.RequestPayloadError) as error:
        raise InvalidRequest("The body is broken: its transfer encoding is malformed.", code="invalid_body") from error
    return bytes(data)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over the limit of {limit} bytes (this server's setting --max-body-bytes).")


def parse_object(data: bytes, limit: int = LEAST_MAX_VALUES) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises InvalidRequest, also if the object has more than `limit` values."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"The body is not UTF-8: byte {error.start} is {data[error.start]:#04x}.") from None
    if text.startswith("\ufeff"):
        raise _malformed("The body begins with a byte order mark; send JSON without one.")
    if len(text) > limit and has_more_values(text, limit):
        raise InvalidRequest(
            f"The body has more than {limit} values: keys, elements and brackets. Send texts instead of token ids, and "
            "fewer of them in one call.",
            code="too_many_values",
        )
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _malformed(f"The body is not JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise _malformed("The body is nested too deeply.") from None
    except ValueError as error:  # Python's bound on the digits of an integer
        raise _malformed(f"The body has a number that is too long: {str(error)[:80]}.") from None
    if type(value) is not dict:
        raise _malformed("The body must be a JSON object.")
    if _SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(value)
    return value


def has_more_values(text: str, limit: int) -> bool:
    """Return True if JSON has more than `limit` keys, elements and brackets. Invalid JSON has no meaningful result."""
    if _marks(text) <= limit:  # even if strings are counted
        return False
    # Without escapes every quote begins or ends a string.
    bare = text.replace("\\\\", "").replace('\\"', "")
    if bare.count('"') > 2 * limit:
        return True
    return _marks("".join(bare.split('"')[::2])) > limit


def _marks(text: str) -> int:
    return sum(text.count(mark) for mark in ",:[{")


def _malformed(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_json")


def _no_constant(name: str) -> NoReturn:
    raise _malformed(f"{name} is not JSON; use a finite number.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidRequest(f"The key {name[:80]!r} occurs twice.", param=_printable(name), code="duplicate_key")
        seen.add(name)
    raise AssertionError("fewer keys than pairs, but no key twice")


def _printable(name: str) -> str:
    return name[:80].encode("utf-8", "replace").decode()


def _refuse_lone_surrogates(body: dict[str, Any]) -> None:
    for name, top in body.items():
        waiting: list[Any] = [name, top]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                if _SURROGATE.search(value):
                    raise InvalidRequest(
                        f"{_printable(name)} has half of a surrogate pair, which is no character; send both halves.",
                        param=_printable(name),
                        code="invalid_unicode",
                    )
            elif isinstance(value, dict):
                waiting += value.keys()
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value

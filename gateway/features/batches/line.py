"""One line of the input of a batch: how it is read, and the lines that the output files have for it.

`{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.gateway.api.parsing import max_values, parse_object
from quire.gateway.errors.api_errors import ApiError, InvalidRequest, refused
from quire.gateway.errors.api_errors import body as error_body
from quire.gateway.features.batches.jsonl import RawLine
from quire.gateway.stream import sse
from quire.shared.config.validators import shown

MAX_CUSTOM_ID = 512
FIELDS = ("custom_id", "method", "url", "body")
REQUEST_PREFIX = "batch_req_"
# Tiers whose class is not below that of a batch are refused: a line waits in the class `batch` in any case.
TIERS = ("auto", "default", "flex")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line that was read. number: among the lines that are not blank, from 1."""

    number: int
    custom_id: str
    body: dict[str, Any]


def call_id_of(batch_id: str, number: int) -> str:
    """Return the id of the call of a line. It follows from the line, so submitting it again makes no second call."""
    return hashlib.sha256(f"{batch_id}:{number}".encode()).hexdigest()[:32]


def read_line(raw: RawLine, endpoint: str, max_bytes: int) -> BatchLine:
    """Read a line of a batch for an endpoint. Raises InvalidRequest."""
    if raw.is_too_long:
        raise InvalidRequest(
            f"The line has more than {max_bytes} bytes (this server's setting --max-body-bytes).", code="line_too_long"
        )
    try:
        given = parse_object(raw.data, max_values(max_bytes))
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("The body", "The line", 1), code=error.code) from error
    for name in given:
        if name not in FIELDS:
            raise refused(name[:80], f"{name[:80]!r} is no field of a line; it has {', '.join(FIELDS)}.")
    for name in FIELDS:
        if name not in given:
            raise refused(name, f"{name} is missing.", code="missing_required_parameter")
    custom_id, body = given["custom_id"], given["body"]
    if type(custom_id) is not str or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise refused("custom_id", f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters.")
    if given["method"] != "POST":
        raise refused("method", f"method must be POST, not {shown(given['method'])}.")
    if given["url"] != endpoint:
        raise refused("url", f"url must be {endpoint}, the endpoint of the batch, not {shown(given['url'])}.")
    if type(body) is not dict:
        raise refused("body", f"body must be an object, not {shown(body)}.")
    _check_body(body)
    return BatchLine(raw.place.number, custom_id, body)


def _check_body(body: dict[str, Any]) -> None:
    """Refuse what a line cannot have because it has no client. Raises InvalidRequest."""
    for name in ("stream", "background"):
        if body.get(name) not in (None, False):
            raise refused(name, f"{name} must be false in a batch; leave it out.")
    if body.get("store") not in (None, False):
        raise refused("store", "store must be false in a batch: the answer is in the output file.")
    # An integer above 0 is the class `batch`, too.
    priority = body.get("priority")
    is_batch = priority in (None, "batch") or (type(priority) is int and priority > 0)
    if not is_batch:
        raise refused("priority", "priority must be batch in a batch; leave it out.")
    if body.get("service_tier") not in (None, *TIERS):
        raise refused("service_tier", f"service_tier must be one of {', '.join(TIERS)} in a batch; leave it out.")


def answer_line(call_id: str, custom_id: str, parts: Iterable[str]) -> Iterator[str]:
    """Yield the line of the output file for a call that has its answer. parts: of the JSON of the answer."""
    yield f'{_head(call_id, custom_id)}"response":{{"status_code":200,"request_id":{sse.quote(call_id)},"body":'
    yield from parts
    yield '},"error":null}\n'


def error_line(call_id: str, custom_id: str, error: ApiError) -> str:
    """Return the line of the error file for a call that ended with an error."""
    return (
        f'{_head(call_id, custom_id)}"response":{{"status_code":{error.status},"request_id":{sse.quote(call_id)},'
        f'"body":{error_body(error)}}},"error":null}}\n'
    )


def unrun_line(call_id: str, custom_id: str, code: str, message: str) -> str:
    """Return the line of the error file for a call that the end of the batch stopped."""
    error = json.dumps({"code": code, "message": message})
    return f'{_head(call_id, custom_id)}"response":null,"error":{error}}}\n'


def _head(call_id: str, custom_id: str) -> str:
    return f'{{"id":{sse.quote(REQUEST_PREFIX + call_id)},"custom_id":{sse.quote(custom_id)},'

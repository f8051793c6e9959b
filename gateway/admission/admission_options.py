"""What a call says about its handling: its deadline, its class, whether it repeats another one."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multidict import CIMultiDictProxy

from quire.gateway.api.errors import InvalidRequest
from quire.gateway.api.options import Options
from quire.gateway.api.parameters import shown

IDEMPOTENCY_KEY = "Idempotency-Key"
REQUEST_TIMEOUT = "X-Request-Timeout"

_VISIBLE = re.compile(r"[!-~]{1,255}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """How the requests of a call are accepted. `deadline_ms` is from now, 0 for none; an empty key is none."""

    priority_class: str
    is_background: bool
    deadline_ms: int
    idempotency_key: str
    fingerprint: str
    # Of the span of the call, where there is one.
    traceparent: str = ""


def read_terms(
    headers: CIMultiDictProxy[str], path: str, body: Mapping[str, Any], options: Options, default_s: float, max_s: float
) -> AdmissionOptions:
    """Raises InvalidRequest that names the header or parameter."""
    key = _single(headers, IDEMPOTENCY_KEY)
    if key is not None and not _VISIBLE.fullmatch(key):
        raise _invalid(
            f"{IDEMPOTENCY_KEY} must be 1 to 255 visible ASCII characters, not {shown(key)}.", IDEMPOTENCY_KEY
        )
    timeout_s = options.timeout_s
    name = "timeout"
    if timeout_s is None and (text := _single(headers, REQUEST_TIMEOUT)) is not None:
        name = REQUEST_TIMEOUT
        timeout_s = float(text) if _SECONDS.fullmatch(text) else math.nan
    if timeout_s is None:
        timeout_s = min(default_s, max_s)
    elif not 0 < timeout_s <= max_s:
        raise _invalid(
            f"{name} must be a number of seconds over 0 and at most {max_s:g} (this server's setting --max-timeout-s), "
            f"not {shown(text if name == REQUEST_TIMEOUT else timeout_s)}.",
            name,
        )
    return AdmissionOptions(
        priority_class=options.priority,
        is_background=options.background,
        deadline_ms=math.ceil(1000 * timeout_s),
        idempotency_key=key or "",
        fingerprint=fingerprint(path, body) if key else "",
    )


def fingerprint(path: str, body: Mapping[str, Any]) -> str:
    """The same for two calls that ask for the same; the order of keys and white space do not count."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{path}\n{canonical}".encode()).hexdigest()


def _single(headers: CIMultiDictProxy[str], name: str) -> str | None:
    values = headers.getall(name, [])
    if len(values) > 1:
        raise _invalid(f"{name} is given {len(values)} times; give it once.", name)
    return values[0] if values else None


def _invalid(message: str, name: str) -> InvalidRequest:
    return InvalidRequest(message, param=name, code="invalid_value")

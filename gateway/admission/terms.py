"""The terms on which a call is let into the queue: its deadline, its priority class, and its idempotency key."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from multidict import CIMultiDictProxy

from quire.gateway.api.call import Call
from quire.gateway.api.headers import IDEMPOTENCY_KEY, KEY
from quire.gateway.errors.api_errors import refused
from quire.shared.config.validators import shown
from quire.shared.protocol.broker import Admission

REQUEST_TIMEOUT = "X-Request-Timeout"

SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def read_terms(
    terms: Admission, headers: CIMultiDictProxy[str], body: Mapping[str, Any], path: str, call: Call, max_s: float
) -> Admission:
    """Return the terms with what the headers and the parameters of a call ask for.

    terms: of this gateway; their deadline is the default. max_s: the longest deadline. Raises InvalidRequest.
    """
    key = _single(headers, IDEMPOTENCY_KEY)
    if key is not None and not KEY.fullmatch(key):
        raise refused(
            IDEMPOTENCY_KEY, f"{IDEMPOTENCY_KEY} must be 1 to 255 visible ASCII characters, not {shown(key)}."
        )
    timeout_s = call.timeout_s
    name = "timeout"
    if timeout_s is None and (text := _single(headers, REQUEST_TIMEOUT)) is not None:
        name = REQUEST_TIMEOUT
        timeout_s = float(text) if SECONDS.fullmatch(text) else math.nan
    if timeout_s is None:
        timeout_s = min(terms.deadline_ms / 1000, max_s)
    elif not 0 < timeout_s <= max_s:
        raise refused(
            name,
            f"{name} must be a number of seconds over 0 and at most {max_s:g} (this server's setting --max-timeout-s), "
            f"not {shown(text if name == REQUEST_TIMEOUT else timeout_s)}.",
        )
    return terms._replace(
        priority_class=call.priority,
        is_background=call.about.is_background,
        deadline_ms=math.ceil(1000 * timeout_s),
        idempotency_key=key or "",
        fingerprint=fingerprint(path, body) if key else "",
    )


def fingerprint(path: str, body: Mapping[str, Any]) -> str:
    """Return a hash of what a call asks for. The order of keys and white space do not count."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{path}\n{canonical}".encode()).hexdigest()


def _single(headers: CIMultiDictProxy[str], name: str) -> str | None:
    values = headers.getall(name, [])
    if len(values) > 1:
        raise refused(name, f"{name} is given {len(values)} times; give it once.")
    return values[0] if values else None

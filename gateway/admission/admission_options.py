"""The admission options of a call: its deadline, its priority class, and its idempotency key."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from multidict import CIMultiDictProxy

from quire.gateway.admission.submission import AdmissionOptions
from quire.gateway.api.call import Options
from quire.gateway.api.headers import IDEMPOTENCY_KEY
from quire.gateway.errors.api_errors import refused
from quire.shared.config.validators import shown

REQUEST_TIMEOUT = "X-Request-Timeout"

_VISIBLE = re.compile(r"[!-~]{1,255}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def read_admission_options(
    headers: CIMultiDictProxy[str], path: str, body: Mapping[str, Any], options: Options, default_s: float, max_s: float
) -> AdmissionOptions:
    """The admission options in the headers and the options of a call.

    default_s and max_s: the default and the longest deadline in seconds. Raises InvalidRequest.
    """
    key = _single(headers, IDEMPOTENCY_KEY)
    if key is not None and not _VISIBLE.fullmatch(key):
        raise refused(
            IDEMPOTENCY_KEY, f"{IDEMPOTENCY_KEY} must be 1 to 255 visible ASCII characters, not {shown(key)}."
        )
    timeout_s = options.timeout_s
    name = "timeout"
    if timeout_s is None and (text := _single(headers, REQUEST_TIMEOUT)) is not None:
        name = REQUEST_TIMEOUT
        timeout_s = float(text) if _SECONDS.fullmatch(text) else math.nan
    if timeout_s is None:
        timeout_s = min(default_s, max_s)
    elif not 0 < timeout_s <= max_s:
        raise refused(
            name,
            f"{name} must be a number of seconds over 0 and at most {max_s:g} (this server's setting --max-timeout-s), "
            f"not {shown(text if name == REQUEST_TIMEOUT else timeout_s)}.",
        )
    return AdmissionOptions(
        priority_class=options.priority,
        is_background=options.background,
        deadline_ms=math.ceil(1000 * timeout_s),
        idempotency_key=key or "",
        fingerprint=fingerprint(path, body) if key else "",
    )


def fingerprint(path: str, body: Mapping[str, Any]) -> str:
    """A hash of what a call asks for. The order of keys and white space do not count."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{path}\n{canonical}".encode()).hexdigest()


def _single(headers: CIMultiDictProxy[str], name: str) -> str | None:
    values = headers.getall(name, [])
    if len(values) > 1:
        raise refused(name, f"{name} is given {len(values)} times; give it once.")
    return values[0] if values else None

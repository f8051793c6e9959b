"""The time after which a file is deleted, as a client gives it in `expires_after`."""

from __future__ import annotations

from quire.gateway.api.errors import refused

# Bounds in seconds (OpenAI API reference).
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000


def check_expiry(name: str, seconds: int) -> int:
    """Return the seconds after which a file is deleted. Raises InvalidRequest."""
    if not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise refused(name, f"{name} must be an integer from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}, not {seconds}.")
    return seconds

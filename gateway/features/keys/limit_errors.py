"""The errors for limits of API keys that a call has reached."""

from __future__ import annotations

import math

from quire.gateway.errors.api_errors import ApiError, BudgetSpent, RateLimited
from quire.shared.protocol.charge import LimitReached


def error_of(reached: LimitReached) -> ApiError:
    """Return the error for a reached limit. Retry-After is exact for limits per minute, rounded up to seconds."""
    kind, _, name = reached.account.partition(":")
    of = f"{reached.limit} of the {kind} {name}"
    if reached.is_budget:
        return BudgetSpent(f"The call could exceed the budget {of}. Send fewer tokens, or ask for a larger budget.")
    if reached.wait_ms < 0:
        return RateLimited(
            f"The call alone exceeds the limit {of}; send fewer tokens, or a smaller max_tokens.",
            headers={"X-Should-Retry": "false"},
        )
    wait_ms = max(1, reached.wait_ms)
    headers = {"Retry-After": str(math.ceil(wait_ms / 1000)), "Retry-After-Ms": str(wait_ms)}
    if reached.limit == "concurrent_requests":
        return RateLimited(f"The limit {of} is reached; wait for the end of a request.", headers=headers)
    return RateLimited(f"The limit {of} is reached; try again in {wait_ms / 1000:g} s.", headers=headers)

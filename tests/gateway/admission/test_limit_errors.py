"""The errors of limits say when to try again."""

from __future__ import annotations

from quire.gateway.admission.limit_errors import error_of
from quire.shared.accounts.charge import LimitReached


def test_a_call_that_can_never_fit_is_not_to_be_repeated() -> None:
    error = error_of(LimitReached("tokens_per_minute", "key:a", -1))
    assert (error.status, error.headers) == (429, {"X-Should-Retry": "false"})
    assert error_of(LimitReached("tokens_per_minute", "key:a", 1001)).headers["Retry-After"] == "2"

"""The caller of a request, and the names of its idempotency keys."""

from __future__ import annotations

from aiohttp.test_utils import make_mocked_request

from quire.gateway.api.caller import ANONYMOUS, CALLER, Caller, caller_of


def test_a_request_has_the_caller_that_was_noted() -> None:
    request = make_mocked_request("GET", "/")
    assert caller_of(request) == ANONYMOUS
    request[CALLER] = Caller("a")
    assert caller_of(request) == Caller("a")


def test_an_idempotency_key_of_two_callers_names_two_calls() -> None:
    names = {Caller(owner).scoped("key") for owner in ("", "a", "b")}
    assert len(names) == 3
    assert Caller("a").scoped("") == ""
    # No client can send this name: idempotency keys are visible characters without spaces.
    assert Caller("a").scoped("key") == "a key"

"""The models that keys may use; tests/gateway/admission/test_key_limits.py has the other limits over HTTP."""

from __future__ import annotations

import pytest

from quire.gateway.api.caller import ANONYMOUS, Caller
from quire.gateway.api.key_policy import check_model, may_use
from quire.gateway.errors.api_errors import ModelNotFound
from quire.shared.accounts.account import Account
from quire.shared.accounts.limits import AccountLimits


def caller(*models: tuple[str, ...]) -> Caller:
    return Caller(
        "a", tuple(Account(kind="key", id="a", name="a", limits=AccountLimits(models=names)) for names in models)
    )


def test_a_model_must_be_one_of_each_account() -> None:
    assert may_use(ANONYMOUS, "a")
    assert may_use(caller((), ("a", "b")), "a")
    assert not may_use(caller(("b",), ("a", "b")), "a")
    with pytest.raises(ModelNotFound, match="does not exist, or your API key has no access"):
        check_model(caller(("b",)), "a")

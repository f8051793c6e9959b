"""The accounts that a call is charged to, and the limits that its answer shows."""

from __future__ import annotations

import msgpack

from quire.shared.accounts.account import Account
from quire.shared.accounts.charge import Charge, LimitReached, Price, RateState
from quire.shared.accounts.limits import AccountLimits


def test_a_charge_has_the_limits_of_each_account() -> None:
    limits = AccountLimits(requests_per_minute=1, tokens_per_minute=2, concurrent_requests=3, tokens_per_day=4)
    account = Account(kind="key", id="0" * 16, name="a", limits=limits)
    packed = Charge((account,), "model", Price(5, 6)).encode(9, begins_call=True)
    root, *rest = msgpack.unpackb(packed)
    assert root.startswith("quire:{accounts}:")
    assert rest == [1, 9, 5, 6, "model", 0, [account.place, 1, 2, 3, 4, 0, 0, 0]]


def test_the_accounts_alone_are_those_of_the_charge() -> None:
    account = Account(kind="key", id="0" * 16, name="a", limits=AccountLimits(tokens_per_day=4))
    charge = Charge((account,), "model", park_s=60)
    whole, accounts = msgpack.unpackb(charge.encode(9, begins_call=True)), msgpack.unpackb(charge.encode_accounts())
    assert (whole[6], whole[7:]) == (60, accounts)


def test_the_tightest_limit_is_kept() -> None:
    charge = Charge((), "model")
    charge.note([[0, 0, 0, 100, 50, 9], [10, 3, 5, 100, 20, 7], [5, 4, 1, 0, 0, 0]])
    assert (charge.calls, charge.tokens) == (RateState(10, 3, 5), RateState(100, 20, 7))


def test_budgets_are_told_from_rates() -> None:
    assert LimitReached("tokens_per_day", "key:a", -1).is_budget
    assert not LimitReached("tokens_per_minute", "key:a", 5).is_budget

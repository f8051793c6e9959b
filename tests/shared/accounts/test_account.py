"""Accounts as JSON: an account equals its copy that is written and read, and corrupt data is refused."""

from __future__ import annotations

import pytest

from quire.shared.accounts.account import Account, check_name
from quire.shared.accounts.limits import AccountLimits
from quire.shared.validators import InvalidValue

KEY = Account(kind="key", id="0" * 16, name="ci", parent="acme/web", created=5, digest="a" * 64, expires=100)


def test_an_account_is_read_as_it_was_written() -> None:
    for account in (
        KEY,
        Account(kind="project", id="acme/web", name="web", parent="acme", limits=AccountLimits(max_tokens=5)),
        Account(kind="organisation", id="acme", name="acme"),
    ):
        assert Account.decode(account.place, account.encode()) == account
    assert KEY.parent_place == "project:acme/web"
    assert Account(kind="project", id="acme/web", name="web", parent="acme").parent_place == "organisation:acme"


def test_digests_are_neither_shown_nor_printed() -> None:
    assert KEY.digest not in repr(KEY)
    assert KEY.digest not in str(KEY.shown())


@pytest.mark.parametrize(
    ("place", "data"),
    [
        ("user:x", "{}"),
        ("key:" + "0" * 16, "{"),
        ("key:" + "0" * 16, "[]"),
        ("key:" + "0" * 16, '{"name": "a", "limits": {}, "is_admin": true}'),
        ("key:" + "0" * 16, '{"name": 1, "limits": {}}'),
        ("key:" + "0" * 16, '{"name": "a", "limits": {"max_tokens": -1}}'),
        ("key:" + "0" * 16, '{"name": "a", "limits": {}, "digest": "x"}'),
        ("key:x", '{"name": "a", "limits": {}}'),
        ("organisation:acme", '{"name": "' + "a" * 70_000 + '", "limits": {}}'),
        ("organisation:acme", "[" * 60_000),
    ],
)
def test_corrupt_accounts_are_refused(place: str, data: str) -> None:
    with pytest.raises(InvalidValue):
        Account.decode(place, data)


def test_only_the_digests_of_a_key_that_is_valid_now_are_accepted() -> None:
    assert KEY.fault("a" * 64, 50) == ""
    assert KEY.fault("b" * 64, 50) == "unknown"
    assert KEY.fault("", 50) == "unknown"
    assert KEY.fault("a" * 64, 100) == "expired"


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "../a", "x" * 65, 5])
def test_names_with_other_characters_are_refused(name: object) -> None:
    with pytest.raises(InvalidValue):
        check_name("project", name)

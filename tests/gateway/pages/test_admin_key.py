"""The key of the admin API comes from a setting or a file, and weak or unreadable ones are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.gateway.errors.api_errors import AdminKeyWrong
from quire.gateway.pages.admin_key import check_admin_key, read_admin_key
from quire.shared.errors import StartError

KEY = "0123456789abcdef"


def test_a_key_comes_from_the_setting_or_the_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    assert read_admin_key("", "") == ""
    assert read_admin_key(KEY, "") == KEY
    assert read_admin_key("", str(tmp_path / "key")) == KEY


@pytest.mark.parametrize("key", [KEY[:-1], "a b" * 10, "ä" * 20, "x" * 1025])
def test_a_weak_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(StartError, match="--admin-key: the key must have 16 to 1024 ASCII") as caught:
        read_admin_key(key, "")
    assert key not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--admin-key-file .*none cannot be read"):
        read_admin_key("", str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    with pytest.raises(StartError, match="empty: the key must have"):
        read_admin_key("", str(tmp_path / "empty"))
    with pytest.raises(StartError, match="both given"):
        read_admin_key(KEY, "x")


def request(header: str) -> Any:
    return SimpleNamespace(headers={"Authorization": header} if header else {})


def test_only_the_bearer_token_opens() -> None:
    check_admin_key(request(f"Bearer {KEY}"), KEY)
    check_admin_key(request(f"bearer {KEY}"), KEY)
    for header in (
        "",
        KEY,
        f"Basic {KEY}",
        "Bearer",
        "Bearer x",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer \udcff",
    ):
        with pytest.raises(AdminKeyWrong):
            check_admin_key(request(header), KEY)

"""The version of whichever package of Quire is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from quire.shared import version


def test_the_first_installed_package_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"quire-worker": "1.2"}

    def find(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    find_version = version.installed_version.__wrapped__  # without the cache
    monkeypatch.setattr(version, "version", find)
    assert find_version("none") == "1.2"
    installed["quire"] = "3.4"
    assert find_version("none") == "3.4"
    installed.clear()
    assert find_version("none") == "none"

"""The version of whichever package of Quire is installed, and what installs more of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from quire.shared import version


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed packages, with their versions."""
    packages = {"quire-worker": "1.2"}

    def find(package: str) -> str:
        if package not in packages:
            raise PackageNotFoundError(package)
        return packages[package]

    monkeypatch.setattr(version, "version", find)
    return packages


def test_the_first_installed_package_names_the_version(installed: dict[str, str]) -> None:
    find_version = version.installed_version.__wrapped__  # without the cache
    assert find_version("none") == "1.2"
    installed["quire"] = "3.4"
    assert find_version("none") == "3.4"
    installed.clear()
    assert find_version("none") == "none"


def test_what_is_missing_is_installed_by_make_in_a_checkout_and_by_pip_elsewhere(
    installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert version.install_command() == "make setup"
    assert version.install_command("tracing") == "pip install -c constraints.txt -e '.[tracing]'"
    monkeypatch.setattr(version, "_SOURCES", tmp_path)
    assert version.install_command("tracing") == 'pip install "quire-worker[tracing]"'
    installed["quire"] = "3.4"
    assert version.install_command() == 'pip install "quire[gateway,worker,embedded]"'

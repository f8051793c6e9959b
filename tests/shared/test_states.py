"""States, keys, shares, backoff and versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from quire.shared.process import version
from quire.shared.process.backoff import Backoff
from quire.shared.protocol.share import read_share

# --- share ------------------------------------------------------------------------------------------------------------
# The fields of a share, as the scripts write them.


@pytest.mark.parametrize(
    ("tenant", "user", "expected"),
    [
        ("standard 100 anonymous", "12 ", ("anonymous", 100, "")),
        ("batch 7 acme/web", "0 0123456789abcdef", ("acme/web", 7, "0123456789abcdef")),
        ("batch 1000 acme/web", "5 ", ("acme/web", 1000, "")),
    ],
)
def test_the_fields_of_a_request_are_read_as_they_are_written(tenant: str, user: str, expected: object) -> None:
    assert read_share(tenant, user) == expected


@pytest.mark.parametrize(
    ("tenant", "user"),
    [
        ("", ""),
        ("acme/web", "0 "),
        ("standard 0 acme/web", "0 "),
        ("standard 1001 acme/web", "0 "),
        ("standard 100 acme web", "0 "),
        ("standard 100 acme/web", "clear text"),
        ("standard 100 acme/web", "-1 aa"),
    ],
)
def test_corrupt_fields_count_for_calls_without_a_key(tenant: str, user: str) -> None:
    assert read_share(tenant, user) == ("anonymous", 100, "")


# --- backoff ----------------------------------------------------------------------------------------------------------


def test_delays_double_up_to_the_limit_and_start_again_after_a_reset() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next() == 0.5


def test_jitter_shortens_a_delay_by_at_most_half_and_does_not_slow_the_doubling() -> None:
    delays = []
    for _ in range(50):
        backoff = Backoff(1.0, 4.0, jitter=True)
        delays.append([backoff.next() for _ in range(4)])
    for step, full in enumerate((1.0, 2.0, 4.0, 4.0)):
        drawn = [one[step] for one in delays]
        assert all(full / 2 <= delay <= full for delay in drawn)
        assert len(set(drawn)) > 1


# --- version ----------------------------------------------------------------------------------------------------------
# The version of whichever package of Quire is installed, and what installs more of it.


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

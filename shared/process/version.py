"""The installed package of Quire: its version, and the command that installs more of it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# The complete package, and those that the images of the two services hold. All have the same version.
PACKAGES = ("quire", "quire-gateway", "quire-worker")
# What serving on one machine needs: the extras that `make setup` installs.
SERVING = "gateway,worker,embedded"

_SOURCES = Path(__file__).resolve().parents[2]


@cache  # looking for the metadata of a package reads folders
def installed_version(default: str) -> str:
    """Return the version of the first installed package of PACKAGES; `default` when running from bare sources."""
    return next(filter(None, map(_version, PACKAGES)), default)


def install_command(extras: str = SERVING) -> str:
    """Return the command that installs the packages of these extras: for a checkout, or for the installed package."""
    if (_SOURCES / "pyproject.toml").is_file():
        return "make setup" if extras == SERVING else f"pip install -c constraints.txt -e '.[{extras}]'"
    package = next(filter(_version, PACKAGES), PACKAGES[0])
    return f'pip install "{package}[{extras}]"'


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

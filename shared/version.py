"""The installed version of Quire, whichever of its packages is installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

# The complete package, and those that the images of the two services hold. All have the same version.
PACKAGES = ("quire", "quire-gateway", "quire-worker")


@cache  # looking for the metadata of a package reads folders
def installed_version(default: str) -> str:
    """The version of the first package of PACKAGES that is installed; `default` when running from bare sources."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return default

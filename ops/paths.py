"""Places on this machine: the project's folder, and the state folders of `quire serve` and of the user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parent.parent
# The folder on the import path that holds the package `quire`.
IMPORT_ROOT = Path(__file__).parents[2]


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Return `.quire` in a checkout; for an installed package `$XDG_STATE_HOME/quire` or ~/.local/state/quire."""
    if (PROJECT_ROOT / "pyproject.toml").is_file():
        return PROJECT_ROOT / ".quire"
    return user_state_dir(environ)


def resolve_state_dir(state_dir: str, environ: Mapping[str, str]) -> Path:
    """Return the state folder of a `quire serve` with this --state-dir; empty for the default."""
    return Path(state_dir).expanduser().absolute() if state_dir else default_state_dir(environ)


def user_state_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder for files of the user rather than of a server, such as the history of `quire chat`."""
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "quire"

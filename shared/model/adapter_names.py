"""Names and places of LoRA adapters, as settings, the admin API and Redis have them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quire.shared.model.naming import MAX_ADAPTER_NAME
from quire.shared.process.errors import StartError

MAX_PATH = 512
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._/:+-]{{0,{MAX_ADAPTER_NAME - 1}}}")
NAME_RULE = f"1 to {MAX_ADAPTER_NAME} letters, digits and . _ / : + -, with a letter or digit first"


class InvalidAdapter(StartError, ValueError):
    """The name or the path of an adapter cannot be used. The text has the remedy."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """An adapter that all workers of a model are to load. path: below --lora-dir. stamp: unique per announcement."""

    name: str
    path: str
    stamp: str

    def encode(self) -> str:
        return json.dumps({"path": self.path, "stamp": self.stamp})

    @classmethod
    def decode(cls, name: str, data: str) -> Announcement:
        """Read an announcement. Raises InvalidAdapter."""
        try:
            value: Any = json.loads(data)
            path, stamp = value["path"], value["stamp"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidAdapter(f"the announcement of the adapter {name!r:.200} is not valid") from None
        if type(stamp) is not str or not 0 < len(stamp) <= 64:
            raise InvalidAdapter(f"the announcement of the adapter {name!r:.200} has no stamp")
        return cls(check_adapter_name(name), check_adapter_path(path), stamp)


def check_adapter_name(name: Any) -> str:
    """Return the name of an adapter. Raises InvalidAdapter."""
    if type(name) is not str or not _NAME.fullmatch(name):
        raise InvalidAdapter(f"{name!r:.200} cannot be the name of an adapter: use {NAME_RULE}")
    return name


def check_adapter_path(path: Any) -> str:
    """Return the path of an adapter below --lora-dir. Raises InvalidAdapter for a path that could leave the folder."""
    is_text = type(path) is str and 0 < len(path) <= MAX_PATH and path.isprintable()
    if not is_text or "\\" in path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise InvalidAdapter(
            f"{path!r:.200} cannot be the path of an adapter: give one relative to --lora-dir, without .."
        )
    return str(path)


def parse_adapters(text: str, model: str) -> dict[str, Path]:
    """Return the folders of the setting --lora by name. model: the served name, which no adapter may have.

    Raises InvalidAdapter.
    """
    adapters: dict[str, Path] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, equals, path = entry.partition("=")
        if not equals or not path:
            raise InvalidAdapter(f"--lora {entry!r:.200} is not NAME=FOLDER; give the adapter a name")
        try:
            check_adapter_name(name)
        except InvalidAdapter as error:
            raise InvalidAdapter(f"--lora: {error}") from None
        if name == model or name in adapters:
            owner = "the model" if name == model else "another adapter"
            raise InvalidAdapter(f"--lora {entry!r:.200}: {owner} has the name {name!r}; choose another one")
        adapters[name] = Path(path).expanduser()
    return adapters

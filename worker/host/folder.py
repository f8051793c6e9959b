"""The models in the folder of --models-dir: each entry that is a model folder, a GGUF file, or a link to one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.shared.model.files import read_json
from quire.shared.model.folder import (
    CONFIG,
    INDEX,
    WEIGHTS,
    find_fault,
    find_gguf,
    gguf_files,
    gguf_name,
    is_gguf,
    weights_fault,
)
from quire.shared.model.naming import is_served_name
from quire.shared.process.errors import StartError
from quire.shared.protocol.messages.host_card import MAX_HOSTED

# Entries of other names are never models: a model that is being copied or removed has such a name.
HIDDEN = "."
# Ends of the names of files that a worker reads, and the most of them that are looked at.
READ, MAX_FILES = (".gguf", ".jinja", ".json", ".model", ".safetensors", ".txt"), 2000


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A model of the folder.

    name: for clients, and of the lane. path: of the entry; of a split GGUF file the first part. place: the GGUF file in
    a folder, else `path`. size: bytes of the weights. architecture: as the model declares it. fault: why it cannot be
    served; empty if nothing is known against it. stamp: changes with the files.
    """

    name: str
    path: Path
    place: Path
    size: int
    architecture: str
    fault: str
    stamp: tuple[int, ...]


def scan(folder: Path, known: Mapping[str, FolderEntry]) -> dict[str, FolderEntry]:
    """Return the models of a folder by name. Entries of `known` whose files have not changed are not read again.

    Raise OSError if the folder cannot be listed.
    """
    found: dict[str, FolderEntry] = {}
    for path in sorted(folder.iterdir())[: 4 * MAX_HOSTED]:
        if path.name.startswith(HIDDEN) or not _may_be_model(path):
            continue
        name = model_name(path)
        stamp = _stamp(path)
        old = known.get(name)
        if name in found:
            what = f"{path.name}: {found[name].path.name} has the same name; rename one of them"
            found.setdefault(path.name, FolderEntry(path.name, path, path, 0, "", what, stamp))
        elif old is not None and (old.path, old.stamp) == (path, stamp):
            found[name] = old
        elif len(found) < MAX_HOSTED:
            found[name] = _read(name, path, stamp)
    return found


def model_name(path: Path) -> str:
    """Return the name of the model at a path of the folder: that of the entry, not of what a link leads to."""
    return gguf_name(path) if is_gguf(path) else path.name


def _may_be_model(path: Path) -> bool:
    """Return whether an entry may be a model. A part of a split model is none if the first part is there."""
    return path.is_dir() or (is_gguf(path) and not (path != (first := gguf_files(path)[0]) and first.is_file()))


def _stamp(path: Path) -> tuple[int, ...]:
    """Return numbers that change with the files of an entry, also while they are being copied."""
    stamp = []
    try:
        files = [file for file in sorted(path.iterdir()) if file.suffix in READ] if path.is_dir() else gguf_files(path)
    except OSError:
        files = []
    for place in (path, *files[:MAX_FILES]):
        try:
            stat = place.stat()
        except OSError:
            stamp.append(0)
            continue
        stamp += [stat.st_ino, stat.st_size, stat.st_mtime_ns]
    return tuple(stamp)


def _read(name: str, path: Path, stamp: tuple[int, ...]) -> FolderEntry:
    try:
        place = find_gguf(path) or path if path.is_dir() else path
        size, architecture, fault = _weights_size(place), _architecture(place), _fault(name, place)
    except OSError as error:
        place, size, architecture, fault = path, 0, "", f"{path.name} cannot be read: {error}"
    return FolderEntry(name, path, place, size, architecture, fault.replace(f"{path.parent}{os.sep}", ""), stamp)


def _fault(name: str, place: Path) -> str:
    if not is_served_name(name):
        return "its name cannot be that of a model: use 1 to 256 letters, digits and . _ / : @ + -"
    if is_gguf(place):
        return ""
    if fault := find_fault(place):
        return str(fault)
    if not (place / CONFIG).is_file():
        return f"{place / CONFIG} is missing; give a folder with config.json, *.safetensors and tokenizer.json"
    if not (place / WEIGHTS).is_file() and not (place / INDEX).is_file():
        return str(weights_fault(place))
    return ""


def _architecture(place: Path) -> str:
    try:
        config = read_json(place / CONFIG)
    except StartError:
        return ""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else config.get("model_type")
    return first[:64] if isinstance(first, str) else ""


def _weights_size(place: Path) -> int:
    """Return the bytes of the weights that a worker reads: of the files that the index names, if there is one."""
    if is_gguf(place):
        files = gguf_files(place)
    elif (place / WEIGHTS).is_file():
        files = [place / WEIGHTS]
    else:
        try:
            names = set(read_json(place / INDEX)["weight_map"].values())
        except (StartError, KeyError, TypeError, AttributeError):
            return 0
        files = [place / name for name in names if isinstance(name, str)]
    return sum(file.stat().st_size for file in files if file.is_file())

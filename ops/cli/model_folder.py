"""`quire models`: lists the models of a folder, adds one from a path or the Hugging Face Hub, removes one."""

from __future__ import annotations

import asyncio
import difflib
import fnmatch
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from quire.ops.cli.settings import AddModel, ListModels, ModelsOfFolder, RemoveModel
from quire.ops.local.preconditions import redis_of
from quire.ops.local.progress import Progress
from quire.ops.paths import resolve_state_dir
from quire.shared.config.command_line import CommandError
from quire.shared.model.folder import GGUF, gguf_files, gguf_name, is_gguf
from quire.shared.model.model_argument import resolve_model
from quire.shared.model.naming import is_served_name
from quire.shared.process.errors import StartError
from quire.shared.process.interrupts import raise_at_ctrl_c
from quire.shared.protocol.broker.hosts import HostRegistry
from quire.shared.protocol.keys import REGISTRY_LANE
from quire.shared.protocol.messages.host_card import HostedModel, by_name
from quire.shared.redis.clients import command_client
from quire.shared.redis.url import BrokerUnavailable
from quire.worker.host.folder import HIDDEN, FolderEntry, scan

GIB, MIB = 1024**3, 1024**2
# Bytes of a copy between two looks of the progress bar.
PIECE = 16 * MIB
# Time for the Redis of a running server to answer; without an answer the list says nothing of its workers.
REDIS_TIMEOUT_S = 2.0
HEADER = ("NAME", "SIZE", "ARCHITECTURE", "STATE", "LAST USED")


def run(settings: ModelsOfFolder, environ: Mapping[str, str]) -> int:
    """Carry out a command on the models of a folder. Raise CommandError."""
    raise_at_ctrl_c()
    if not settings.models_dir:
        raise CommandError("--models-dir (QUIRE_MODELS_DIR) is missing; give the folder of the models")
    folder = Path(settings.models_dir).expanduser().absolute()
    if not folder.is_dir():
        raise CommandError(f"--models-dir {settings.models_dir}: there is no such folder; make it, or name another one")
    if isinstance(settings, AddModel):
        return _add(settings, folder)
    hosted = _read_hosted(settings, environ)
    if isinstance(settings, RemoveModel):
        return _remove(settings, folder, hosted)
    return _list(settings, folder, hosted)


# --- list -------------------------------------------------------------------------------------------------------------


def _list(settings: ModelsOfFolder, folder: Path, hosted: Mapping[str, HostedModel]) -> int:
    entries = _entries(folder)
    rows = [_row(entry, hosted.get(name)) for name, entry in entries.items()]
    if isinstance(settings, ListModels) and settings.json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"{folder} has no models; `quire models add` puts one there", file=sys.stderr)
        return 0
    cells = [HEADER] + [_cells(row) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER))]
    for cell, row in zip(cells, [None, *rows], strict=True):
        print("  ".join(f"{text:<{width}}" for text, width in zip(cell, widths, strict=True)).rstrip())
        if row is not None and row["reason"]:
            print(f"    {row['reason']}")
    return 0


def _row(entry: FolderEntry, hosted: HostedModel | None) -> dict[str, Any]:
    """Return what the list says of a model; its names are those of the JSON."""
    fault = entry.fault or (hosted.reason if hosted else "") or _examined(entry.place)
    return {
        "name": entry.name,
        "bytes": entry.size,
        "architecture": entry.architecture or None,
        "status": "refused" if entry.fault or (fault and not hosted) else str(hosted.state) if hosted else None,
        "last_used": hosted.used_ms / 1000 if hosted and hosted.used_ms else None,
        "path": str(entry.path),
        "reason": fault or None,
    }


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["last_used"])) if row["last_used"] else "-"
    state = (row["status"] or "-").replace("_", " ")
    return row["name"], _size(row["bytes"]), row["architecture"] or "-", state, used


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _entries(folder: Path) -> dict[str, FolderEntry]:
    try:
        return scan(folder, {})
    except OSError as error:
        raise CommandError(f"--models-dir {folder} cannot be read: {error.strerror}") from error


def _examined(place: Path) -> str:
    """Return why a worker would refuse a model by its configuration and tokenizer; empty if it would not."""
    from quire.shared.protocol.registered_files import read_files
    from quire.worker.models.choice import choose_model

    try:
        choose_model(place)
        read_files(place)
    except StartError as error:
        return str(error).replace(f"{place.parent}{os.sep}", "")
    return ""


def _read_hosted(settings: ModelsOfFolder, environ: Mapping[str, str]) -> dict[str, HostedModel]:
    """Return what running hosts say of their models; nothing if no Redis answers."""
    url = settings.redis_url or redis_of(resolve_state_dir(settings.state_dir, environ)).url

    async def read() -> dict[str, HostedModel]:
        client = command_client(url, REGISTRY_LANE, connections=1)
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                return by_name(await HostRegistry(client).cards())
        finally:
            await client.aclose()

    try:
        return asyncio.run(read())
    except BrokerUnavailable as error:
        raise CommandError(str(error)) from error
    except (RedisError, OSError, TimeoutError):
        if settings.redis_url:
            print("the Redis of --redis-url does not answer: states are unknown", file=sys.stderr)
        return {}


# --- add --------------------------------------------------------------------------------------------------------------


def _add(settings: AddModel, folder: Path) -> int:
    if not settings.model:
        raise CommandError("MODEL is missing; give a folder, a GGUF file, or a Hugging Face name such as owner/name")
    resolved = resolve_model(settings.model)
    is_local = Path(resolved).exists()
    source = Path(resolved) if is_local else _download(resolved)
    parts = gguf_files(source) if is_gguf(source) else []
    suffix = GGUF if len(parts) == 1 else ""  # the parts of a split model are in a folder
    given = Path(settings.model).expanduser()
    found = (gguf_name(given) if is_gguf(given) else given.resolve().name) if is_local else resolved.rpartition("/")[2]
    name = settings.name or found
    if not is_served_name(name) or "/" in name or name.startswith(HIDDEN):
        raise CommandError(
            f"{name!r} cannot be the name of a model in a folder: use letters, digits and . _ : @ + -, a letter or "
            "digit first (--name)"
        )
    if name in _entries(folder) or (folder / f"{name}{suffix}").exists():
        raise CommandError(f"{folder} has a model {name!r}; give another --name, or remove that one first")
    if fault := _examined(source):
        raise CommandError(f"model: {fault}")
    target = folder / f"{name}{suffix}"
    try:
        if settings.mode == "link" or (settings.mode == "auto" and not is_local):
            _link(source, parts, target)
            done = f"linked to {source}"
        else:
            _copy(_copied_files(source, parts), target, name)
            done = f"copied from {source}"
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error.strerror or error}") from error
    print(f"{name}: {done}")
    return 0


def _download(model: str) -> Path:
    """Return the folder of a model of the Hub in the local cache. The Hub's client shows its progress."""
    from quire.worker.models.files.loader import resolve

    try:
        return resolve(model)
    except StartError as error:
        raise CommandError(str(error)) from error


def _link(source: Path, parts: Sequence[Path], target: Path) -> None:
    if len(parts) < 2:
        target.symlink_to(source)
        return
    draft = target.with_name(f"{HIDDEN}adding-{target.name}")
    _delete(draft)  # of a command that was broken off
    draft.mkdir()
    for part in parts:
        (draft / part.name).symlink_to(part)
    draft.rename(target)


def _copy(files: Mapping[str, Path], target: Path, name: str) -> None:
    """Copy files under a hidden name, and rename them when all are there."""
    total = sum(file.stat().st_size for file in files.values())
    free = shutil.disk_usage(target.parent).free
    if total > free:
        raise CommandError(f"{name} has {_size(total)}, and {target.parent} has {_size(free)} free; make room there")
    draft = target.with_name(f"{HIDDEN}adding-{target.name}")
    _delete(draft)  # of a copy that was broken off
    progress, done = Progress(sys.stderr), 0
    try:
        for place, file in files.items():
            copy = draft / place if place else draft
            copy.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as reading, copy.open("wb") as writing:
                while piece := reading.read(PIECE):
                    writing.write(piece)
                    done += len(piece)
                    progress.update(f"copying {name}: {100 * done // max(total, 1)} %", f"copying {name}")
        draft.rename(target)
    except BaseException:
        _delete(draft)
        raise
    finally:
        progress.clear()


def _copied_files(source: Path, parts: Sequence[Path]) -> dict[str, Path]:
    """Return the files of a model by their place in its folder; a whole GGUF file has an empty place."""
    if parts:
        return {part.name if len(parts) > 1 else "": part for part in parts}
    from quire.worker.models.files.loader import DOWNLOADED, NOT_DOWNLOADED

    files = {path.relative_to(source).as_posix(): path for path in sorted(source.rglob("*")) if path.is_file()}
    return {
        place: file
        for place, file in files.items()
        if _matches(place, DOWNLOADED) and not _matches(place, NOT_DOWNLOADED)
    }


def _matches(place: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(place, pattern) for pattern in patterns)


# --- remove -----------------------------------------------------------------------------------------------------------


def _remove(settings: RemoveModel, folder: Path, hosted: Mapping[str, HostedModel]) -> int:
    entries = _entries(folder)
    entry = entries.get(settings.name)
    if entry is None:
        nearest = difflib.get_close_matches(settings.name, entries, n=1)
        remedy = f"did you mean {nearest[0]!r}?" if nearest else "`quire models list` shows all"
        raise CommandError(f"{folder} has no model {settings.name!r}: {remedy}")
    what = f"the link {entry.path}" if entry.path.is_symlink() else f"{entry.path} ({_size(entry.size)})"
    if not settings.yes:
        if not sys.stdin.isatty():
            raise CommandError(f"this deletes {what}; give --yes")
        if input(f"Delete {what}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    try:
        # Of a split model the first part goes first, since it is the model.
        for path in gguf_files(entry.path) if is_gguf(entry.path) else [entry.path]:
            gone = path.with_name(f"{HIDDEN}removed-{path.name}")
            _delete(gone)
            if os.path.lexists(path):  # a part may be missing
                path.rename(gone)  # at once: a worker never finds half of a model
            _delete(gone)
    except OSError as error:
        raise CommandError(f"{entry.path} cannot be removed: {error.strerror or error}") from error
    is_loaded = settings.name in hosted and hosted[settings.name].state in ("loaded", "loading")
    print(f"{settings.name}: removed" + ("; its open calls get up to 30 s to end" if is_loaded else ""))
    return 0


def _delete(path: Path) -> None:
    """Delete a folder, a file or a link, but never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

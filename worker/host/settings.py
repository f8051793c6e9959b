"""The settings of a model host: their checks, and what follows from them for its workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quire.shared.config.settings import PREFIX, to_environ
from quire.shared.process.errors import StartError
from quire.shared.process.start_pipe import PIPE
from quire.worker.device import placement, topology
from quire.worker.host.folder import FolderEntry
from quire.worker.host.plan import Room
from quire.worker.host_memory import available_memory
from quire.worker.settings import WorkerSettings

GIB = 1024**3
MEMORY_SHARE = 0.9
# NVIDIA's driver has a folder here for each GPU.
_DRIVER = Path("/proc/driver/nvidia/gpus")
# Settings that belong to one model.
_OF_ONE_MODEL = (
    "served_model_name",
    "model_aliases",
    "lora",
    "lora_dir",
    "pinned_prefixes",
    "upstream",
    "kv_spill_dir",
)


def check_host_settings(settings: WorkerSettings) -> Path:
    """Return the folder of models. Raise StartError for settings that do not fit --models-dir."""
    folder = Path(settings.models_dir).expanduser().absolute()
    if not folder.is_dir():
        raise StartError(f"--models-dir {settings.models_dir}: there is no such folder; make it, or name another one")
    for name in _OF_ONE_MODEL:
        if getattr(settings, name):
            raise StartError(
                f"--{name.replace('_', '-')} belongs to one model, and --models-dir serves all of a folder; leave it "
                "out, or start a worker of that model"
            )
    if settings.models_max > 1 and _may_use_gpu(settings) and not (settings.kv_cache_gb or settings.num_blocks):
        raise StartError(
            f"--models-max {settings.models_max}: each model takes most of a GPU's memory; say with --kv-cache-gb how "
            "much each gets for its cache, or take --models-max 1"
        )
    return folder


def room_of(settings: WorkerSettings) -> Room:
    """Return what the models of a host share. Read it before the first one is loaded."""
    size = int(settings.models_memory_gb * GIB)
    if not size:
        size = sys.maxsize if _may_use_gpu(settings) else int(MEMORY_SHARE * available_memory())
    return Room(settings.models_max, size, settings.models_slice_s, settings.models_idle_s)


def too_large(entry: FolderEntry, settings: WorkerSettings, room: Room) -> str:
    """Return why a model is too large for the host; empty if it is not."""
    if entry.size <= room.size:
        return ""
    limit = (
        f"--models-memory-gb is {settings.models_memory_gb:g}"
        if settings.models_memory_gb
        else f"{room.size / GIB:.2f} GiB were available at start"
    )
    size = f"{entry.size / GIB:.2f} GiB"
    return f"its weights take {size}, and {limit}; raise --models-memory-gb, or take a smaller model"


def worker_environ(settings: WorkerSettings, entry: FolderEntry, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the worker of a model."""
    threads = settings.threads
    if not threads and settings.models_max > 1 and not _may_use_gpu(settings):
        cores = placement.place(topology.read_topology(), binding="none").threads
        threads = max(1, cores // settings.models_max)
    own = replace(
        settings,
        model=str(entry.path),
        served_model_name=entry.name,
        worker_id=settings.name,
        internal_port=0,
        threads=threads,
        models_dir="",
    )
    kept = {name: text for name, text in environ.items() if not name.startswith(PREFIX) and name != PIPE}
    return kept | {name: text for name, text in to_environ(own).items() if name}


def _may_use_gpu(settings: WorkerSettings) -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return settings.device == "cuda" or (
        settings.device == "auto" and not hidden and _DRIVER.is_dir() and any(_DRIVER.iterdir())
    )

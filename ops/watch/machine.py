"""The checks of this machine: processor and kernels, memory, GPU, limits, disk and the port.

Each check is a function of a root folder, which tests replace; /proc and /sys are Linux.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from quire.ops.local.ports import free_port
from quire.ops.paths import IMPORT_ROOT, PROJECT_ROOT
from quire.ops.watch.checks import Check, Verdict, found
from quire.ops.watch.servers import running

GIB = 2**30
MIN_FILES = 4096
MIN_DISK = 2 * GIB
# Docker's default is 64 MiB. NCCL, which joins GPUs, uses more.
MIN_SHM = 256 * 2**20
ROOT = Path("/")


def checks(model: str, host: str, port: int, state_dir: Path) -> list[Check]:
    """Return all checks of this machine."""
    return [
        processor(),
        memory(model),
        gpu(),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        shared_memory(),
        huge_pages(),
        overcommit(),
        disk(state_dir),
        free_for_clients(host, port),
    ]


def processor() -> Check:
    """Check which kernels this processor runs, and whether they are built."""
    build, name = kernel_build(), "processor"
    if build is None:
        return found(name, "no worker is installed here, so no kernels are needed")
    if platform.machine() not in ("x86_64", "AMD64"):
        remedy = "use a GPU, or a machine with x86-64: plain torch computes here, slowly"
        return found(name, f"{platform.machine()}: there are no C++ kernels for it", remedy)
    common, later = build.find(build.COMMON), "python -m quire.kernels.cpu.build builds them now"
    if common is None:
        try:
            seen = f"the C++ kernels are not built: the first start takes minutes to build them with {build.compiler()}"
        except build.BuildError as error:
            what, _, remedy = str(error).partition(": ")
            return found(name, f"the C++ kernels are not built, and there is {what}", remedy, Verdict.FAILED)
        return found(name, seen, later)
    levels = build.supported(common)
    if not levels:
        remedy = "use a processor with AVX2, FMA and F16C, or a GPU"
        return found(name, "it runs none of the C++ kernels", remedy, Verdict.FAILED)
    orders = {"float32": build.FLOAT32_LEVELS, "bfloat16": build.BFLOAT16_LEVELS}
    wanted = {kind: next((level for level in order if level in levels), "") for kind, order in orders.items()}
    missing = [level for level in wanted.values() if level and build.find(level) is None]
    kinds = ", ".join(f"{kind} with {level}" if level else f"no {kind}" for kind, level in wanted.items())
    state = f"not built: {', '.join(missing)}" if missing else "the kernels are built"
    return found(name, f"{len(os.sched_getaffinity(0))} cores; {kinds}; {state}", later if missing else "")


def kernel_build() -> Any:
    """Return the module that builds and finds the C++ kernels, without importing torch; None if it is not installed."""
    path = IMPORT_ROOT / "quire" / "kernels" / "cpu" / "build.py"
    spec = spec_from_file_location("quire_kernel_build", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def memory(model: str, root: Path = ROOT) -> Check:
    """Compare the memory that is available with the size of a model."""
    rows = [row.split() for row in _read(root / "proc/meminfo").splitlines()]
    free = next((1024 * int(row[1]) for row in rows if row[0] == "MemAvailable:"), None)
    if free is None:
        return found("memory", "not known on this system")
    size = _size(model)
    seen = f"{free / GIB:.1f} GiB available" + (f", the model has {size / GIB:.2f} GiB" if size else "")
    if size > free:
        remedy = "give the machine more memory, or serve a smaller or a quantised model; float32 doubles bfloat16"
        return found("memory", seen, remedy, Verdict.FAILED)
    remedy = "leave room for the KV cache: --kv-cache-gb bounds it (docs/how-to/memory.md)"
    return found("memory", seen, remedy if 2 * size > free else "")


def _read(path: Path) -> str:
    """Return the text of a file of the kernel; empty if it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(model: str) -> int:
    """Return the bytes of the weights of a folder or GGUF file; 0 for a name of the Hub, which may not be here."""
    path = Path(model).expanduser()
    if not path.exists() and (PROJECT_ROOT / model).exists():
        path = PROJECT_ROOT / model
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")] if path.is_dir() else []
    return sum(file.stat().st_size for file in files)


def gpu(root: Path = ROOT) -> Check:
    """Check that there is a GPU, and that the installed torch can use it."""
    driver, torch = root / "proc/driver/nvidia", ""
    with suppress(PackageNotFoundError):
        torch = version("torch")
    said = _read(driver / "version").partition("\n")[0].removeprefix("NVRM version: ")
    if not said:
        return found("gpu", "no NVIDIA driver: models run on the processor")
    count = len(list((driver / "gpus").glob("*")))
    if not count:
        return found("gpu", f"no GPU, {said}", "give the container GPUs (docker run --gpus all)")
    if torch.endswith("+cpu"):
        remedy = 'install the CUDA build: pip install --force-reinstall "torch==' + torch.removesuffix("+cpu") + '"'
        return found("gpu", f"{count} GPUs, {said}; torch {torch} cannot use them", remedy)
    return found("gpu", f"{count} GPUs, {said}; torch {torch or 'is not installed'}")


def open_files(limit: int) -> Check:
    """Check how many connections a gateway may hold: each is an open file."""
    if limit == resource.RLIM_INFINITY or limit >= MIN_FILES:
        return found("open files", f"at most {limit}")
    remedy = f"ulimit -n {4 * MIN_FILES}, or LimitNOFILE={4 * MIN_FILES} in the unit of systemd"
    return found("open files", f"at most {limit}, and each client needs one", remedy)


def shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Check the shared memory, which workers on several GPUs use."""
    free = shutil.disk_usage(folder).free if folder.is_dir() else MIN_SHM
    remedy = "docker run --shm-size 1g, or shm_size in Compose; in Kubernetes an emptyDir of medium Memory"
    few = ", too few for a model on several GPUs" if free < MIN_SHM else ""
    return found("shared memory", f"{free / 2**20:,.0f} MiB free in {folder}{few}", remedy if few else "")


def huge_pages(root: Path = ROOT) -> Check:
    """Check that transparent huge pages do not slow down Redis, as Redis itself warns at its start."""
    said = _read(root / "sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0]
    if said != "always":
        return found("huge pages", f"transparent_hugepage is {said or 'not there'}")
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root, on the machine of Redis"
    seen = "transparent_hugepage is always: Redis stands and takes memory while it rewrites its file"
    return found("huge pages", seen, remedy)


def overcommit(root: Path = ROOT) -> Check:
    """Check that Redis can fork, as Redis itself warns at its start."""
    said = _read(root / "proc/sys/vm/overcommit_memory").strip()
    if said != "0":
        return found("overcommit", f"vm.overcommit_memory is {said or 'not there'}")
    remedy = "sysctl vm.overcommit_memory=1, as root, on the machine of Redis"
    return found("overcommit", "vm.overcommit_memory is 0: Redis cannot rewrite its file when memory is short", remedy)


def disk(state_dir: Path) -> Check:
    """Check the disk of the queue's file and the logs."""
    place = next(folder for folder in (state_dir, *state_dir.parents) if folder.exists())
    if not os.access(place, os.W_OK):
        return found("disk", f"{place} cannot be written", "pass a --state-dir of yours", Verdict.FAILED)
    free = shutil.disk_usage(place).free
    remedy = "free some: Redis takes no writes when the disk is full, and calls get 503" if free < MIN_DISK else ""
    return found("disk", f"{free / GIB:.1f} GiB free for {state_dir}", remedy)


def free_for_clients(host: str, port: int) -> Check:
    """Check that nothing listens on the port, and name what does."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        user = next(_users(port), "")
        if user.startswith("the `quire serve`"):
            return found("port", f"{port} on {host} is served by {user}")
        seen = ": ".join(filter(None, (f"{port} on {host}", error.strerror or str(error), user)))
        return found("port", seen, f"pass --port {free_port()}, or end what listens there", Verdict.FAILED)
    return found("port", f"{port} on {host} is free")


def _users(port: int) -> Iterator[str]:
    """Yield who listens on a port of this machine, of this user's processes."""
    for server in running([]):
        if server.url.endswith(f":{port}"):
            yield f"the `quire serve` {server.pid} ({server.state_dir})"
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [row.split() for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
            listening = [row for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]
            inodes |= {f"socket:[{row[9]}]" for row in listening}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(entry) in inodes for entry in (process / "fd").iterdir()):
                yield f"process {process.name} ({(process / 'comm').read_text().strip()}) listens there"

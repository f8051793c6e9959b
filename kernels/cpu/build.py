"""Builds the C++ kernels into one shared library, and finds a library that was built before.

The file name is a hash of the sources and the flags, so a stale library is never loaded. The file is in `_build` next
to the sources, or in $XDG_CACHE_HOME/quire if that folder is not writable. The build renames the file into place, so a
process never loads a partly written file while another process builds. The library contains every instruction-set
level, and the level is chosen at run time, so a library that was built on one machine runs on any other x86-64 machine.

    python -m quire.kernels.cpu.build
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.kernels.unavailable import KernelsUnavailable

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
# The instruction set of each level is in its source file (level_*.cpp), not here. -ffp-contract=off: the compiler would
# fuse a multiplication and an addition for one tile size and not for another, and rows would differ.
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread"),
    *("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
]


def compiler() -> str:
    """Return the path of the C++ compiler: $CXX or g++. Raises KernelsUnavailable if it is missing."""
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(wanted)
    if found is None:
        raise KernelsUnavailable(f"no C++ compiler {wanted!r} on PATH: install g++ 11 or later, or set CXX")
    return found


def _compiler_version(command: str) -> str:
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def _sources() -> list[Path]:
    return sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")])


def _digest() -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _cache_dirs() -> list[Path]:
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [SOURCE_DIR / "_build", user_cache / "quire"]


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def find() -> Path | None:
    """Return the path of the library that was built from these sources, or None."""
    name = f"{_digest()}.so"
    return next((d / name for d in _cache_dirs() if (d / name).is_file()), None)


def build() -> Path:
    """Compile the library if it is missing, and return its path.

    Raises KernelsUnavailable without a compiler, without a writable folder, or on a platform other than x86-64 Linux.
    """
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise KernelsUnavailable(f"the C++ kernels need Linux on x86-64, not {sys.platform} on {platform.machine()}")
    if (built := find()) is not None:
        return built
    command = compiler()
    directory = next((d for d in _cache_dirs() if _writable(d)), None)
    if directory is None:
        raise KernelsUnavailable(f"cannot write to {' or '.join(map(str, _cache_dirs()))}: set XDG_CACHE_HOME")
    log.info("building the C++ kernels with %s: once, about half a minute", command)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        units = [path for path in _sources() if path.suffix == ".cpp"]
        objects = [str(Path(scratch) / f"{path.stem}.o") for path in units]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda unit, to: _run([command, *FLAGS, "-c", str(unit), "-o", to]), units, objects))
        library = Path(scratch) / "library.so"
        _run([command, "-shared", "-pthread", "-static-libstdc++", "-static-libgcc", *objects, "-o", str(library)])
        target = directory / f"{_digest()}.so"
        os.replace(library, target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise KernelsUnavailable(f"{' '.join(command[:1])} failed, is it g++ 11 or later?\n{done.stderr[-2000:]}")


def main() -> int:
    """Build the library and print one line. Returns 0 also if it cannot be built: plain torch computes then."""
    start = time.monotonic()
    try:
        path = build()
    except KernelsUnavailable as error:
        print(f"kernels: not built, plain torch will be used ({error})")
        return 0
    print(f"kernels: {path.name} with {_compiler_version(compiler())} in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

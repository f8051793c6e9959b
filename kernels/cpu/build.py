"""Builds the C++ kernels into shared libraries, and finds libraries that were built before.

One library has what needs no special instructions, and each instruction-set level has a library of its own, which uses
it. A machine needs at most two levels, one for each type of activations, so the others are built only when a process
asks for them. All levels run on any x86-64 machine that has their instructions.

The file names have a hash of the sources and the flags, so a stale library is never loaded. The files are in `_build`
next to the sources, or in $XDG_CACHE_HOME/quire if that folder is not writable. The build renames each file into place,
so a process never loads a partly written file. One process builds at a time; others wait for its libraries.

    python -m quire.kernels.cpu.build                # what this processor needs
    python -m quire.kernels.cpu.build --supported    # every level that it runs, for tests
    python -m quire.kernels.cpu.build --all          # every level, for other machines
    python kernels/cpu/build.py                      # before any package is installed: this file imports none
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
# The instruction set of each level is in its source file (level_*.cpp), not here. -ffp-contract=off: the compiler would
# fuse a multiplication and an addition for one tile size and not for another, and rows would differ.
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread"),
    *("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
]
LINK_FLAGS = ["-shared", "-pthread", "-static-libstdc++", "-static-libgcc"]
# The library that all levels use.
COMMON = "common"
# The levels by their numbers in processor.cpp.
LEVELS = ("avx2", "avx512", "avx512vnni", "avx512bf16", "amxint8", "amx")
# The levels for activations of bfloat16 and of float32, the best first, as in levels.py.
BFLOAT16_LEVELS = ("amx", "avx512bf16")
FLOAT32_LEVELS = ("amxint8", "avx512vnni", "avx512", "avx2")
# The interval at which a process that waits for another one looks again.
POLL_S = 0.2

# Called with the number of compiled units, and of all units to compile.
Report = Callable[[int, int], None]


class BuildError(RuntimeError):
    """The kernels cannot be built here. The text names the remedy."""


class Unit(NamedTuple):
    """A source file, or one of the parts of a level's source file (parts.h)."""

    source: Path
    part: int

    def arguments(self, folder: str) -> list[str]:
        """Return the arguments of the compiler for this unit. folder: where its object goes."""
        return [f"-DLEVEL_PART={self.part}", "-c", str(self.source), "-o", self.object(folder)]

    def object(self, folder: str) -> str:
        return f"{folder}/{self.source.stem}-{self.part}.o"


def compiler() -> str:
    """Return the path of the C++ compiler: $CXX or g++. Raises BuildError if it is missing."""
    wanted = os.environ.get("CXX", "g++")
    path = shutil.which(wanted)
    if path is None:
        raise BuildError(f"no C++ compiler {wanted!r} on PATH: install g++ 11 or later, or set CXX")
    return path


def _sources() -> list[Path]:
    return sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")])


def _units(library: str) -> list[Unit]:
    """Return the units of a library, the unit that takes longest first."""
    if library == COMMON:
        return [Unit(path, 0) for path in _sources() if path.suffix == ".cpp" and not path.stem.startswith("level_")]
    parts = (1, 0) if library in BFLOAT16_LEVELS else (1, 2, 0, 3)
    return [Unit(SOURCE_DIR / f"level_{library}.cpp", part) for part in parts]


def _file_name(library: str) -> str:
    digest = hashlib.sha256(" ".join([*FLAGS, *LINK_FLAGS]).encode())
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{digest.hexdigest()[:20]}-{library}.so"


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


def find(library: str) -> Path | None:
    """Return the path of the library that was built from these sources, or None."""
    name = _file_name(library)
    return next((d / name for d in _cache_dirs() if (d / name).is_file()), None)


def build(libraries: Sequence[str], report: Report = lambda done, total: None) -> list[Path]:
    """Compile those libraries that are missing, and return the paths of all. Levels need COMMON.

    Raises BuildError without a compiler, without a writable folder, or on a platform other than x86-64 Linux.
    """
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise BuildError(f"the C++ kernels need Linux on x86-64, not {sys.platform} on {platform.machine()}")
    paths = [find(library) for library in libraries]
    if None in paths:
        compiler()
        directory = next((d for d in _cache_dirs() if _writable(d)), None)
        if directory is None:
            raise BuildError(f"cannot write to {' or '.join(map(str, _cache_dirs()))}: set XDG_CACHE_HOME")
        with _turn(directory / "lock", report) as tell:
            if missing := [library for library in libraries if find(library) is None]:
                _compile(missing, directory, tell)
        paths = [find(library) for library in libraries]
    return [path for path in paths if path is not None]


def supported(common: Path) -> list[str]:
    """Return the levels that this processor and operating system run. common: the path of the library COMMON."""
    supports = ctypes.CDLL(str(common)).quire_supports
    return [level for number, level in enumerate(LEVELS) if supports(number)]


def build_for_this_machine(every_level: bool = False, report: Report = lambda done, total: None) -> list[Path]:
    """Build COMMON and, of the levels that this processor runs, the best of each type of activations, or every one.

    Raises BuildError.
    """
    [common] = build([COMMON])
    runs = supported(common)
    best = [next((level for level in order if level in runs), "") for order in (BFLOAT16_LEVELS, FLOAT32_LEVELS)]
    return [common, *build(runs if every_level else [level for level in best if level], report)]


@contextmanager
def _turn(lock: Path, report: Report) -> Iterator[Report]:
    """Wait until no other process builds, and report what that process has done. Yields the function to report to."""
    with open(lock, "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                done, _, total = file.read().partition(" ")
                if done.isdigit() and total.isdigit():
                    report(int(done), int(total))
                time.sleep(POLL_S)

        def tell(done: int, total: int) -> None:
            file.truncate(0)
            file.write(f"{done} {total}")
            file.flush()
            report(done, total)

        yield tell
        file.truncate(0)


def _compile(libraries: Sequence[str], directory: Path, report: Report) -> None:
    """Compile the units of these libraries, as many at a time as this process may use processors, and link them."""
    command, started = compiler(), time.monotonic()
    units = [unit for library in libraries for unit in _units(library)]
    log.info("building the C++ kernels with %s: %s, %d units", command, ", ".join(libraries), len(units))
    report(0, len(units))
    with tempfile.TemporaryDirectory(dir=directory) as scratch, ThreadPoolExecutor(_processors()) as pool:
        runs = [pool.submit(_run, [command, *FLAGS, *unit.arguments(scratch)]) for unit in units]
        try:
            for done, run in enumerate(as_completed(runs), start=1):
                run.result()
                report(done, len(units))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        for library in libraries:
            name = _file_name(library)
            uses = [] if library == COMMON else [str(find(COMMON) or directory / _file_name(COMMON))]
            objects = [unit.object(scratch) for unit in _units(library)]
            named = [f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN"]
            _run([command, *LINK_FLAGS, *named, *objects, *uses, "-o", f"{scratch}/{name}"])
            os.replace(f"{scratch}/{name}", directory / name)
    log.info("built the C++ kernels in %.1f s", time.monotonic() - started)


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command[:1])} failed, is it g++ 11 or later?\n{done.stderr[-2000:]}")


class _Line:
    """The progress of a build: one line that is redrawn on a terminal, and nothing elsewhere."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._text = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)
        if sys.stderr.isatty():
            self._thread.start()

    def report(self, done: int, total: int) -> None:
        self._text = f"{done} of {total} units, "

    def end(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        while not self._ended.wait(0.1):
            text = f"building the C++ kernels: {self._text}{time.monotonic() - self._started:.0f} s"
            width = shutil.get_terminal_size((80, 24)).columns - 1
            print("\r\x1b[2K" + text[:width], end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Build, and print one line. Returns 0 also if the kernels cannot be built: plain torch computes then."""
    if arguments not in ([], ["--supported"], ["--all"]):
        print(f"kernels: {' '.join(arguments)} is unknown: give --supported, --all or nothing", file=sys.stderr)
        return 2
    line, start = _Line(), time.monotonic()
    try:
        if arguments == ["--all"]:
            paths = build([COMMON, *LEVELS], line.report)
        else:
            paths = build_for_this_machine(bool(arguments), line.report)
    except BuildError as error:
        line.end()
        print(f"kernels: not built, plain torch will be used ({error})")
        return 0
    line.end()
    levels = ", ".join(path.stem.partition("-")[2] for path in paths)
    print(f"kernels: {levels} in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

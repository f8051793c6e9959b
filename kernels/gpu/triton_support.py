"""The versions of Triton and of its assembler that compile these kernels correctly, and Triton's errors as one line.

Does not import Triton at the top, so that machines without it can import this module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OLDEST = "3.7.1"
INSTALL = f"pip install triton=={OLDEST}"
# The assembler for Hopper (compute capability 9.x). Older ones generate wrong code for some products of matrices whose
# left matrix is in registers (Triton pull requests 11781 and 11854; flash-linear-attention pull request 1262).
HOPPER, OLDEST_PTXAS = 9, "13.3"
# The package that brings a newer ptxas, and the major version of CUDA whose drivers load its machine code.
PTXAS_PACKAGE, PTXAS_CUDA = "nvidia-cuda-nvcc", 13
# Longest excerpt of a compiler's message, in characters.
MAX_MESSAGE_LENGTH = 200


class TritonFailure(NamedTuple):
    """Why a kernel cannot be compiled or launched. Each field is one line."""

    kernel: str  # "the Triton kernel NAME", or "a Triton kernel" if the error does not name it
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kernel} cannot run here ({self.cause}): {self.remedy}"


def outdated_triton() -> str | None:
    """Return version, fault and remedy of an installed Triton older than OLDEST; None for a newer or a missing one."""
    version = _version()
    if version is None or _numbers(version) >= _numbers(OLDEST):
        return None
    return (
        f"triton {version} leaves out fences between copies and products in attention kernels, and results may be "
        f"wrong: {INSTALL}"
    )


def outdated_assembler(capability: tuple[int, int]) -> str | None:
    """Return version, fault and remedy of the ptxas that Triton runs, if it is too old for a GPU; else None.

    capability: compute capability of the GPU. Triton runs TRITON_PTXAS_PATH, or the ptxas that it brings along.
    """
    if capability[0] != HOPPER:
        return None
    try:
        tool = importlib.import_module("triton").knobs.nvidia.ptxas
    except (ImportError, AttributeError, RuntimeError):  # no Triton, another one, or no ptxas: compiling will say so
        return None
    if _numbers(tool.version) >= _numbers(OLDEST_PTXAS):
        return None
    return (
        f"ptxas {tool.version} ({tool.path}) may compile attention for Hopper wrongly; the self-test sees this only in "
        f"the shapes that it runs: pip install '{PTXAS_PACKAGE}>={OLDEST_PTXAS}' if torch was built for CUDA 13, or "
        "name another ptxas in TRITON_PTXAS_PATH"
    )


def use_installed_assembler(cuda: str | None) -> Path | None:
    """Have Triton run the ptxas of PTXAS_PACKAGE, and return its path; None if Triton keeps its own.

    cuda: version of CUDA that torch was built for. Triton keeps its own ptxas if TRITON_PTXAS_PATH is set, if the
    package is missing or too old, or if torch was built for an older CUDA: the driver may not load its machine code.
    """
    if os.environ.get("TRITON_PTXAS_PATH") or _numbers(cuda or "")[0] < PTXAS_CUDA:
        return None
    try:
        package = importlib.metadata.distribution(PTXAS_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    if _numbers(package.version) < _numbers(OLDEST_PTXAS):
        return None
    for file in package.files or ():
        path = Path(str(file.locate()))
        if file.name == "ptxas" and file.parent.name == "bin" and os.access(path, os.X_OK):
            os.environ["TRITON_PTXAS_PATH"] = str(path)
            return path
    return None


def _version() -> str | None:
    """Return the version of the installed Triton; None if it is missing."""
    try:
        version: str = importlib.import_module("triton").__version__
    except ImportError:
        return None
    return version


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in match.groups()) if match else (0, 0, 0)


def triton_failure(error: BaseException) -> TritonFailure | None:
    """Explain an error that Triton raises while it compiles or launches a kernel; None for any other error.

    An AssertionError is explained if Triton's own code raised it. A RuntimeError, such as one of the driver, is not
    explained: its message is one line already.
    """
    if not (_is_of_triton(error) or (isinstance(error, AssertionError) and _comes_from_triton(error))):
        return None
    innermost = list(_causes(error))[-1]
    kind, words = type(innermost).__name__, _words(innermost)
    name = _kernel_name(error)
    if "libcuda" in words:
        remedy = "set TRITON_LIBCUDA_PATH to the folder of the driver's libcuda.so.1, or run ldconfig as root"
    elif kind == "OutOfResources":
        remedy = "this GPU has less of it than the tiles need; take a 16-bit --dtype if it is float32"
    elif kind == "PTXASError":
        remedy = "name another ptxas in TRITON_PTXAS_PATH, or unset it and Triton takes its own"
    elif _version() == OLDEST:  # the tests compile all kernels with this version
        remedy = "report this line with the name of the GPU"
    else:
        remedy = INSTALL
    cause = words if words.startswith(kind) else f"{kind}: {words}"
    return TritonFailure(f"the Triton kernel {name}" if name else "a Triton kernel", cause, remedy)


def _is_of_triton(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] == "triton"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the errors that it wraps. Triton wraps an error in a kernel that another kernel calls."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _words(error: BaseException) -> str:
    """Return an error's message without the source of the kernel and without the assembler's command line."""
    said = str(getattr(error, "error_message", None) or error)
    complaints = [line for line in said.splitlines() if re.search(r"ptxas\b.*\b(fatal|error)\b", line)]
    return " ".join((complaints[-1] if complaints else said).split())[:MAX_MESSAGE_LENGTH] or "no message"


def _frames(error: BaseException) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield module and local variables of each frame of the traceback, the outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_globals.get("__name__", ""), trace.tb_frame.f_locals
        trace = trace.tb_next


def _comes_from_triton(error: BaseException) -> bool:
    modules = [module for module, _ in _frames(error)]
    return bool(modules) and modules[-1].split(".")[0] == "triton"


def _kernel_name(error: BaseException) -> str | None:
    """Return the name of the kernel whose launch raised the error. Triton's errors do not name it."""
    for module, variables in _frames(error):
        launched = variables.get("self")
        if module == "triton.runtime.jit" and hasattr(launched, "fn"):
            return str(launched.fn.__name__)
    return None

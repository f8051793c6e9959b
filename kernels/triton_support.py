"""The versions of Triton that compile these kernels correctly, and Triton's errors as one line.

Imports no Triton: a machine may lack it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import NamedTuple

OLDEST = "3.7.1"
INSTALL = f"pip install triton=={OLDEST}"
# Characters of a compiler's message that are kept.
MOST_WORDS = 200


class TritonFailure(NamedTuple):
    """Why a kernel cannot be compiled or launched; each field is one line."""

    kernel: str  # "the Triton kernel NAME", or "a Triton kernel" where the error does not tell
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kernel} cannot run here ({self.cause}): {self.remedy}"


def outdated_triton() -> str | None:
    """Version, fault and remedy of an installed Triton that is older than OLDEST; None if it is not, or is missing."""
    version = _version()
    if version is None or _numbers(version) >= _numbers(OLDEST):
        return None
    return (
        f"triton {version} leaves out fences between copies and products in attention kernels, and results may be "
        f"wrong: {INSTALL}"
    )


def _version() -> str | None:
    """That of the installed Triton; None if it is missing."""
    try:
        version: str = importlib.import_module("triton").__version__
    except ImportError:
        return None
    return version


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)


def triton_failure(error: BaseException) -> TritonFailure | None:
    """Explain an error that Triton raises while it compiles or launches a kernel; None for any other error.

    An AssertionError counts where Triton's own code raises it. A RuntimeError, as of the driver, is in one line already
    and does not count.
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
    elif _version() == OLDEST:  # the version that tests compile all kernels with
        remedy = "report this line with the name of the GPU"
    else:
        remedy = INSTALL
    cause = words if words.startswith(kind) else f"{kind}: {words}"
    return TritonFailure(f"the Triton kernel {name}" if name else "a Triton kernel", cause, remedy)


def _is_of_triton(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] == "triton"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that Triton wraps: a kernel that calls another is compiled inside of it."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _words(error: BaseException) -> str:
    """Shorten an error's message: no source of the kernel, no command of the assembler."""
    said = str(getattr(error, "error_message", None) or error)
    complaints = [line for line in said.splitlines() if re.search(r"ptxas\b.*\b(fatal|error)\b", line)]
    return " ".join((complaints[-1] if complaints else said).split())[:MOST_WORDS] or "no message"


def _frames(error: BaseException) -> Iterator[tuple[str, dict[str, object]]]:
    """Module and local variables of each frame that the error has passed, the outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_globals.get("__name__", ""), trace.tb_frame.f_locals
        trace = trace.tb_next


def _comes_from_triton(error: BaseException) -> bool:
    modules = [module for module, _ in _frames(error)]
    return bool(modules) and modules[-1].split(".")[0] == "triton"


def _kernel_name(error: BaseException) -> str | None:
    """The kernel whose launch raised the error: Triton's errors do not name it."""
    for module, variables in _frames(error):
        launched = variables.get("self")
        if module == "triton.runtime.jit" and hasattr(launched, "fn"):
            return str(launched.fn.__name__)
    return None

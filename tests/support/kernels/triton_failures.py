"""Makes Triton raise an error, and prints the type of the error and its `kernels.triton_failure` as JSON.

    python -m tests.support.kernels.triton_failures static_assert|called|ptxas|shared|libcuda

TRITON_INTERPRET must not be set. Kernels are compiled for compute capability 9.0; this machine needs no such GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from quire import kernels


@triton.jit
def checked(BLOCK: tl.constexpr):
    tl.static_assert(BLOCK % 8 == 0, f"BLOCK is {BLOCK}")
    return BLOCK


@triton.jit
def wrong_kernel(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK % 8 == 0, f"BLOCK is {BLOCK}")
    tl.store(x, BLOCK)


@triton.jit
def calling_kernel(x, BLOCK: tl.constexpr):
    tl.store(x, checked(BLOCK))


@triton.jit
def right_kernel(x):
    at = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + at)
    tl.store(x + at, tl.trans(values))  # through 4 KiB of shared memory


class Card:
    """The driver of an imaginary card. shared_bytes: the shared memory of a program."""

    def __init__(self, shared_bytes: int) -> None:
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": shared_bytes})
        self.launcher_cls = lambda source, metadata: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CardWithoutLibrary(Card):
    """A driver whose initialisation does not find libcuda."""

    def get_current_device(self) -> int:
        nvidia.library_dirs()
        raise RuntimeError("there is a libcuda.so.1 here")


def raised(launch: Callable[[], object]) -> Exception:
    try:
        launch()
    except Exception as error:
        return error
    raise SystemExit("nothing was raised")


def main(case: str) -> None:
    x, card = torch.zeros(1024), Card(1000)
    if case == "libcuda":
        card = CardWithoutLibrary(1000)
        subprocess.check_output = lambda *_, **__: b""  # the output of ldconfig
        os.environ.pop("LD_LIBRARY_PATH", None)
    triton.runtime.driver.set_active(card)
    launches: dict[str, Callable[[], object]] = {
        "static_assert": lambda: wrong_kernel[(1,)](x, BLOCK=7),
        "called": lambda: calling_kernel[(1,)](x, BLOCK=7),
        "ptxas": lambda: right_kernel[(1,)](x, ptx_options="--no-such-option"),
    }
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        error = raised(launches.get(case, lambda: right_kernel[(1,)](x)))
    print(json.dumps({"raised": type(error).__name__, "line": str(kernels.triton_failure(error))}))


if __name__ == "__main__":
    main(sys.argv[1])

"""Compiles kernels for Hopper in a process of its own: in a test process, Triton interprets the kernels.

    python -m tests.kernels.ptx.compile_server

Reads one request of `compiler.Compiler` per line, and answers each with one line of JSON.
"""

import importlib
import json
import sys
from typing import Any

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

from tests.support.kernels.compile_for_cuda import Target

CAPABILITY = 90


class Pointer(MockTensor):
    """A tensor of which only the dtype and the alignment are known."""

    def __init__(self, dtype: str, alignment: int) -> None:
        super().__init__(getattr(torch, dtype))
        self._alignment = alignment

    def data_ptr(self) -> int:
        return self._alignment


def argument(one: Any) -> Any:
    """Return an argument from its description, see `compiler`."""
    if not isinstance(one, dict):
        return one
    if "pointer" in one:
        return Pointer(*one["pointer"])
    base, shape, strides, block_shape, swizzle, bits = one["descriptor"]
    return TensorDescriptor(argument(base), shape, strides, block_shape, NVMMASharedLayout(swizzle, bits, len(shape)))


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one launch."""
    kernel = getattr(importlib.import_module(request["module"]), request["kernel"])
    arguments = [argument(one) for one in request["arguments"]]
    found = kernel.run(*arguments, grid=(1,), warmup=True, **request["options"])
    signature = {name: kind for name, kind in found.src.signature.items() if kind != "constexpr"}
    return {"ptx": found.asm["ptx"], "shared": found.metadata.shared, "signature": signature}


def main() -> None:
    triton.runtime.driver.set_active(Target(CAPABILITY))
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        try:
            answer = compiled(json.loads(line))
        except Exception as error:
            cause = error.__cause__
            answer = {"error": f"{type(error).__name__}: {error}" + (f": {cause}" if cause else "")}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

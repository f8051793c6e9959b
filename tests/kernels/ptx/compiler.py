"""The compiler of the emulator: asks a process that compiles kernels for Hopper without a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.shared.process.processes import dying_with_parent

ROOT = Path(__file__).parents[3]
ALIGNMENT = 16  # bytes; Triton distinguishes only addresses that are multiples of it


def is_descriptor(argument: Any) -> bool:
    """Return whether an argument is Gluon's descriptor of a tensor."""
    return hasattr(argument, "block_shape")


def _described(argument: Any) -> Any:
    """Return an argument as JSON, with all that Triton specialises for."""
    if is_descriptor(argument):
        layout = argument.layout
        shapes = list(argument.shape), list(argument.strides), list(argument.block_shape)
        return {"descriptor": [_described(argument.base), *shapes, layout.swizzle_byte_width, layout.element_bitwidth]}
    if isinstance(argument, torch.Tensor):
        return {"pointer": [str(argument.dtype).removeprefix("torch."), argument.data_ptr() % ALIGNMENT]}
    return argument


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel with one specialisation."""

    ptx: str
    shared_bytes: int
    signature: dict[str, str]  # name and type of each argument that is passed at run time: "*bf16", "i32"


class Compiler:
    """A process that compiles, and its answers so far."""

    def __init__(self) -> None:
        environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            dying_with_parent([sys.executable, "-m", "tests.kernels.ptx.compile_server"]),
            cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answers: dict[str, CompiledKernel] = {}

    def compile(self, module: str, kernel: str, arguments: list[Any], options: dict[str, Any]) -> CompiledKernel:
        """Compile a kernel for a launch with these arguments. options: constants, num_warps and num_stages by name."""
        described = [_described(one) for one in arguments]
        request = json.dumps(
            {"module": module, "kernel": kernel, "arguments": described, "options": options}, sort_keys=True
        )
        if request not in self._answers:
            self._answers[request] = self._ask(request)
        return self._answers[request]

    def _ask(self, request: str) -> CompiledKernel:
        assert self._process.stdin
        assert self._process.stdout
        print(request, file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return CompiledKernel(answer["ptx"], answer["shared"], answer["signature"])

    def close(self) -> None:
        self._process.communicate()

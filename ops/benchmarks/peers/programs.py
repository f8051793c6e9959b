"""The programs that are compared: where they are found, and the flags with which each of them is fastest.

docs/benchmarking.md says which flags were tried.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.ops.benchmarks.peers.machine import processor_flags, quire_version
from quire.ops.benchmarks.stack.load import CASES
from quire.ops.local.ports import free_port
from quire.shared.config.command_line import CommandError

SERVED_NAME = "m"
VERSION_TIMEOUT_S = 120.0
# Flags of llama-server, by case: the best of those tried with f16 weights. A slot has the tokens of the case's longest
# request.
# Fewer slots than requests let later prompts of `prefix` follow earlier prompts in the same slot.
LLAMACPP_FLAGS = dict.fromkeys(CASES, "") | {"prefix": "-np 4"}
LLAMACPP_SLOT_TOKENS = 768
# The line of a worker's log that names its types and kernels.
LOADING = re.compile(r" as (\w+)(?: with (\w+) weights)? with ([\w-]+) kernels(?:.* KV cache in (\w+))?")


class PeerProgram(Protocol):
    """A server program.

    name: as given with --peer. per_case: True if its flags depend on the case, so that it restarts for each.
    health: the page that answers with 200 when it serves.
    """

    name: str
    per_case: bool
    health: str

    def command(self, case: str, port: int) -> list[str]: ...

    def environ(self) -> dict[str, str]: ...

    def version(self) -> str: ...

    def format(self) -> str: ...


@dataclass
class Quire:
    """`quire serve` of this checkout.

    arguments: further arguments. state: folder for Redis' data and the logs.
    """

    model: Path
    arguments: list[str]
    state: Path
    name: str = "quire"
    per_case: bool = False
    health: str = "/readyz"

    def command(self, case: str, port: int) -> list[str]:
        serve = [sys.executable, "-m", "quire", "serve", str(self.model), "--served-model-name", SERVED_NAME]
        return [*serve, "--port", str(port), "--state-dir", str(self.state), *self.arguments]

    def environ(self) -> dict[str, str]:
        return {key: value for key, value in os.environ.items() if key == "KERNELS_CPU_ISA"}

    def version(self) -> str:
        return quire_version()

    def format(self) -> str:
        """Return the types of activations, weights and KV cache, and the kernels, from the worker's log."""
        logs = "".join(path.read_text(errors="replace") for path in sorted((self.state / "logs").glob("worker*")))
        matches = LOADING.findall(logs)
        if not matches:
            return ""
        dtype, weights, kernels, cache = matches[-1]
        kinds = [f"{weights} weights" if weights else "", dtype, f"KV cache {cache}" if cache else "", kernels]
        return ", ".join(kind for kind in kinds if kind)


@dataclass
class LlamaCpp:
    """llama.cpp's `llama-server`, with a GGUF file. arguments: replace the flags that are best for a case."""

    path: str
    gguf: Path
    arguments: list[str] | None
    name: str = "llamacpp"
    per_case: bool = True
    health: str = "/health"

    def command(self, case: str, port: int) -> list[str]:
        threads = str(len(os.sched_getaffinity(0)))
        slots = CASES[case].concurrency
        flags = shlex.split(LLAMACPP_FLAGS[case]) if self.arguments is None else self.arguments
        start = [self.path, "-m", str(self.gguf), "--alias", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
        start += ["-t", threads, "-tb", threads, "-np", str(slots), "-c", str(slots * LLAMACPP_SLOT_TOKENS)]
        return start + flags

    def environ(self) -> dict[str, str]:
        return {}

    def version(self) -> str:
        text = _output([self.path, "--version"])
        match = re.search(r"version: (.+)", text)
        return match.group(1).strip() if match else "unknown"

    def format(self) -> str:
        """Return the type of the weights and the instructions of the build that this processor has.

        llama-server says both only in a verbose log, which would cost time while it serves. So a second server is
        started, and ended as soon as it has said them.
        """
        command = [self.path, "-m", str(self.gguf), "--host", "127.0.0.1", "--port", str(free_port()), "-lv", "4"]
        kind, instructions = self.gguf.name, ""
        try:
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
                assert server.stdout is not None
                for line in server.stdout:
                    if "system_info:" in line:
                        instructions = " ".join(re.findall(r"(\w+) = 1", line))
                    if match := re.search(r"file type\s*=\s*(.+)", line):
                        kind = match.group(1).strip()
                        break
                    if "listening" in line:
                        break
                server.kill()
        except OSError:
            pass
        return ", ".join(part for part in (kind, instructions) if part)


@dataclass
class Vllm:
    """vLLM's server. arguments: added to the flags below."""

    path: str
    model: Path
    arguments: list[str]
    name: str = "vllm"
    per_case: bool = False
    health: str = "/health"

    def command(self, case: str, port: int) -> list[str]:
        context = json.loads((self.model / "config.json").read_text()).get("max_position_embeddings", 2048)
        serve = [self.path, "serve", str(self.model), "--served-model-name", SERVED_NAME, "--port", str(port)]
        serve += ["--dtype", vllm_dtype(processor_flags()), "--max-num-seqs", "64"]
        return [*serve, "--max-model-len", str(min(2048, context)), *self.arguments]

    def environ(self) -> dict[str, str]:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        return {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}

    def version(self) -> str:
        """Return the line that begins with a number: warnings of its packages may surround it."""
        lines = _output([self.path, "--version"]).splitlines()
        return next((line.strip() for line in lines if re.match(r"\s*\d+\.\d", line)), "unknown")

    def format(self) -> str:
        return vllm_dtype(processor_flags())


def vllm_dtype(flags: list[str]) -> str:
    """Return the type with which vLLM is fastest: without a bfloat16 product, bfloat16 takes it five times as long."""
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & {*flags} else "float32"


def find_program(peer: str, given: str, variable: str, program: str, environ: Mapping[str, str]) -> str:
    """Return the path of a program: the flag's, the variable's, or that on PATH. Raise CommandError."""
    wanted = given or environ.get(variable, "") or program
    path = shutil.which(wanted)
    if path is None:
        raise CommandError(
            f"--peer {peer}: there is no {wanted!r}; pass --{peer} PATH, set {variable}, or name a running server with "
            f"--peer {peer}=URL"
        )
    return str(Path(path).absolute())


def _output(command: list[str]) -> str:
    """Return what a command prints, on both outputs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr

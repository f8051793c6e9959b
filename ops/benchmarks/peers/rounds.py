"""The measurement: in each round every server runs the case once, in an order that rotates, with the same prompts.

Each round has its own seed, so no prefix cache helps from round to round. All servers stay up, one of them works at a
time; the processor time that the others use meanwhile is recorded.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quire.ops.benchmarks.peers.processes import ServerProcess
from quire.ops.benchmarks.peers.programs import SERVED_NAME, PeerProgram
from quire.ops.benchmarks.stack.load import LoadCase, run_case
from quire.ops.loadgen.client import clock
from quire.ops.local.ports import free_port

# Warm-up before the first round of a case: as many requests as are open at once, with short answers. Before each
# measured run one such request, which wakes up threads that have slept.
WARM_UP_TOKENS = 16
# Seeds of warm-ups differ from those of rounds.
WARM_UP_SEED = 1 << 40
SAFE = re.compile(r"[^\w.-]+")


@dataclass
class Side:
    """One server of the comparison.

    program: None for a server that runs already, at `url`. process: None while it is not started.
    """

    name: str
    program: PeerProgram | None
    url: str = ""
    model: str = SERVED_NAME
    process: ServerProcess | None = None
    about: dict[str, Any] | None = None

    def start(self, case: str, folder: Path) -> None:
        """Start the program for a case, unless it runs. Raise CommandError."""
        if self.program is None:
            self.about = {"name": self.name, "url": self.url}
            return
        if self.process is not None:
            return
        port = free_port()
        command = self.program.command(case, port)
        environ = self.program.environ()
        log = folder / f"{SAFE.sub('-', self.name)}.log"
        self.process = ServerProcess(self.name, command, {**os.environ, **environ}, log)
        self.url = f"http://127.0.0.1:{port}"
        self.process.wait_ready(self.url + self.program.health)
        self.about = {
            "name": self.name,
            "version": self.program.version(),
            "format": self.program.format(),
            "flags": _shown(command, port),
            "environ": environ,
            "ready_s": round(self.process.ready_s, 2),
        }

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None


def measure(
    sides: Sequence[Side],
    cases: Sequence[LoadCase],
    rounds: int,
    seed: int,
    vocab_size: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Run all cases. Return one entry per case: its servers, their memory after it, and the result of each run."""
    entries = []
    with tempfile.TemporaryDirectory(prefix="quire-peers-") as folder:
        try:
            for case in cases:
                for side in sides:
                    say(f"{case.name}: starting {side.name}")
                    side.start(case.name, Path(folder))
                entries.append(_measure_case(sides, case, rounds, seed, vocab_size, say))
                for side in sides:
                    if side.program is not None and side.program.per_case:
                        side.stop()
        finally:
            for side in sides:
                side.stop()
    return entries


def _measure_case(
    sides: Sequence[Side], case: LoadCase, rounds: int, seed: int, vocab_size: int, say: Callable[[str], None]
) -> dict[str, Any]:
    warm_up = replace(case, requests=case.concurrency, output_tokens=WARM_UP_TOKENS)
    for side in sides:
        _run(side, warm_up, vocab_size, WARM_UP_SEED + seed)
    runs = []
    for index in range(rounds):
        for place, side in enumerate(rotated(sides, index)):
            _run(side, replace(warm_up, requests=1), vocab_size, WARM_UP_SEED + seed + 1 + index)
            others = [other for other in sides if other is not side and other.process is not None]
            before = [other.process.cpu_s() for other in others if other.process]
            started = clock()
            result = _run(side, case, vocab_size, case_seed(seed, case, index))
            seconds = clock() - started
            idle = sum(other.process.cpu_s() for other in others if other.process) - sum(before)
            runs.append(
                {
                    "server": side.name,
                    "round": index,
                    "place": place,
                    **{name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()},
                    "others_cores": round(idle / seconds, 4),
                }
            )
            say(f"{case.name} round {index + 1}: {side.name} {result['output_tokens_per_s']:.1f} output tokens/s")
    memory = [round(side.process.memory_mib()) if side.process else None for side in sides]
    servers = [{**(side.about or {}), "memory_mib": mib} for side, mib in zip(sides, memory, strict=True)]
    return {"case": case.name, "load": asdict(case), "seed": seed, "servers": servers, "runs": runs}


def rotated(sides: Sequence[Side], index: int) -> list[Side]:
    """Return the order of a round: each server goes first equally often, and every second round runs backwards."""
    at = (index // 2) % len(sides)
    order = [*sides[at:], *sides[:at]]
    return order if index % 2 == 0 else order[::-1]


def case_seed(seed: int, case: LoadCase, index: int) -> int:
    """Return the seed of one round of a case."""
    return random.Random(f"{seed} {case.name} {index}").getrandbits(32)


def _run(side: Side, case: LoadCase, vocab_size: int, seed: int) -> dict[str, Any]:
    return asdict(asyncio.run(run_case(side.url, side.model, vocab_size, case, seed, keep_alive=False)))


def _shown(command: Sequence[str], port: int) -> str:
    """Return the arguments of a command, without paths and port."""
    words = [Path(word).name if word.startswith("/") else word for word in command]
    return shlex.join(words).replace(str(port), "PORT")

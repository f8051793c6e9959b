"""Spilled KV blocks change no text: workers that spill are killed, files are damaged, and successors read them (37)."""

from __future__ import annotations

import random
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from quire.ops.local.ports import free_port
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.conftest import QuireProcess
from tests.faults.test_real_engine import FLAGS, SUBJECTS, kill
from tests.support.faults.calls import assert_same
from tests.support.faults.stack import FaultStack, Stream, said

pytestmark = [pytest.mark.faults, pytest.mark.timeout(500)]

CALLS = 12
AT_ONCE = 8
# Four prompts fill the cache, and computing a step takes so long that reading blocks pays.
SIZES = ("--max-model-len", "256", "--num-blocks", "40", "--max-num-seqs", "4", "--max-num-batched-tokens", "32")
STEP = {"TEST_STEP_S": "0.02"}
READ, CORRUPT = 'quire_spill_read_blocks_total{tier="disk"', 'quire_spill_dropped_blocks_total{reason="corrupt"'
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 1, "n": 2, "logprobs": 2},
)


def call(number: int, **others: Any) -> dict[str, Any]:
    subject = SUBJECTS[number % len(SUBJECTS)]
    text = " ".join(f"{index}. A story about {subject} and {SUBJECTS[index % 3]}." for index in range(12))
    kind = KINDS[number % len(KINDS)]
    return {"model": "tiny", "prompt": f"{text} {number}:", "max_tokens": 24, "seed": number, **kind, **others}


def answers(url: str, numbers: list[int]) -> list[list[str]]:
    """Return the choices of these calls, of which AT_ONCE run at a time."""
    found = []
    for first in range(0, len(numbers), AT_ONCE):
        streams = [Stream(url, call(number)) for number in numbers[first : first + AT_ONCE]]
        found += [[said([choice]) for choice in stream.wait_end(100).answer["choices"]] for stream in streams]
    return found


def counted(ports: dict[str, int], name: str) -> float:
    """Return a counter, by its name and labels, summed over workers. ports: of /metrics, by worker."""
    replies = [urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) for port in ports.values()]
    lines = [line for reply in replies for line in reply.read().decode().splitlines()]
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def damage(path: Path, draw: random.Random) -> None:
    """Flip a bit in each page of the file, apart from its header and entries."""
    with path.open("r+b") as file:
        content = bytearray(file.read())
        for at in range(1 << 16, len(content), 4096):
            content[at + draw.randrange(4096)] ^= 1 << draw.randrange(8)
        file.seek(0)
        file.write(content)


def cached(url: str, number: int, **others: Any) -> int:
    stream = Stream(url, call(number, **others)).wait_end(100)
    return int((stream.answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))


@pytest.mark.promise
@pytest.mark.parametrize("count", [32, pytest.param(400, marks=pytest.mark.soak)])
def test_killed_workers_whose_successors_read_their_blocks_give_the_texts_of_one_that_spills_nothing(
    count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stack = FaultStack(tmp_path_factory.mktemp("stack"), PROJECT_ROOT / DEFAULT_MODEL)
    folder = tmp_path_factory.mktemp("spill")
    try:
        _, url = stack.gateway("--write-timeout-s", "60")
        plain = stack.worker("plain", *FLAGS, *SIZES, **STEP)
        expected = answers(url, [*range(CALLS)])
        kill(plain)
        draw, ports = random.Random(5), {"a": free_port(), "b": free_port()}
        crew: dict[str, QuireProcess] = {}
        done, read, corrupt = 0, 0.0, 0.0
        while done < count:
            for name in "ab":
                if name not in crew or crew[name].process.poll() is not None:
                    spill = ("--kv-spill-dir", str(folder), "--kv-spill-gb", "0.02")
                    flags = (*FLAGS, *SIZES, *spill, "--internal-port", str(ports[name]))
                    crew[name] = stack.worker(name, *flags, ready=False, **STEP)
            for worker in crew.values():
                worker.wait_for("ready: worker", 100)
            numbers = [draw.randrange(CALLS) for _ in range(AT_ONCE)]
            streams = [Stream(url, call(number) | {"stream": True}) for number in numbers]
            for stream in streams[:: AT_ONCE // 2]:
                stream.wait_events(draw.randint(1, 12), 100)
            read, corrupt = read + counted(ports, READ), corrupt + counted(ports, CORRUPT)
            killed = draw.choice("ab")
            kill(crew[killed])
            named = dict(zip(map(str, range(AT_ONCE)), streams, strict=True))
            assert_same(named, {str(index): expected[number] for index, number in enumerate(numbers)})
            alive = {name: port for name, port in ports.items() if name != killed}
            read, corrupt = read + counted(alive, READ), corrupt + counted(alive, CORRUPT)
            if done == AT_ONCE or draw.random() < 0.4:
                for worker in crew.values():
                    if worker.process.poll() is None:
                        kill(worker)
                for path in sorted(folder.iterdir()):
                    damage(path, draw)
            done += len(numbers)
        assert read > 0
        assert corrupt > 0
        assert len(list(folder.iterdir())) == 2, "two workers at a time, two files"
        for worker in crew.values():
            if worker.process.poll() is None:
                kill(worker)
        # A file that is whole is of use to the next worker, for the same salt only.
        whole = tmp_path_factory.mktemp("whole")
        flags = (*FLAGS, *SIZES, "--kv-spill-dir", str(whole), "--kv-spill-gb", "0.02")
        for name in ("c", "d"):
            last = stack.worker(name, *flags, ready=False, **STEP)
            last.wait_for("ready: worker", 100)
            assert cached(url, 1, cache_salt=f"salt of {name}") == 0
            known = cached(url, 1)
            last.process.terminate()  # it writes what its prefix cache has
            last.wait()
        assert known > 100
        stack.assert_invariants()
    finally:
        stack.close()

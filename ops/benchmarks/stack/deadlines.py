"""The gain of refusing calls whose deadlines cannot be met: one worker, a gateway that does and one that does not.

python -m quire.ops.benchmarks.stack.deadlines                        three loads, about eight minutes
python -m quire.ops.benchmarks.stack.deadlines --loads 1.5 --rounds 6

Stories of the demo model arrive as a Poisson process at a multiple of the measured capacity. Each call has a deadline
of 2 to 5 times the duration of a call at an idle server. The figure is the goodput: calls per second whose whole answer
came before their deadline. Rounds alternate between the two gateways, which share the worker, and begin with an empty
queue. Both sides of a pair of rounds get the same calls at the same times.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from quire.ops.benchmarks.peers.machine import machine, quire_version
from quire.ops.benchmarks.peers.processes import answers
from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.ops.local.ports import free_port
from quire.ops.paths import PROJECT_ROOT
from quire.shared.process.processes import dying_with_parent
from quire.shared.protocol.keys import BEAT_S

MODES = {"with": "--deadline-admission", "without": "--no-deadline-admission"}
# Deadlines, in durations of a call at an idle server.
SHORTEST, LONGEST = 2.0, 5.0
SUBJECTS = ("a fox", "an owl", "a mouse", "a bear", "a hare", "a frog", "a goose", "a cat")
PLACES = ("a lighthouse", "a mill", "a bakery", "a garden", "a station", "an island", "a library", "a bridge")


@contextmanager
def servers(folder: Path, args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Run Redis, a worker and the gateways. Yields the URL of each gateway."""
    model, rows = args.model, str(args.rows)
    redis = EmbeddedRedis(folder)
    redis.start()
    common = ["--redis-url", redis.url, "--served-model-name", "demo", "--log-level", "warning"]
    ports = {mode: str(free_port()) for mode in MODES}
    commands = [["quire", "worker", model, "--max-num-seqs", rows, *common]]
    if args.step_ms:
        flags = ["--redis-url", redis.url, "--model-name", "demo", "--step-ms", str(args.step_ms), "--sequences", rows]
        commands = [["quire.ops.benchmarks.stack.clockwork", *flags]]
    commands += [["quire", "gateway", model, "--port", ports[mode], flag, *common] for mode, flag in MODES.items()]
    processes = [subprocess.Popen(dying_with_parent([sys.executable, "-m", *each])) for each in commands]
    try:
        urls = {mode: f"http://127.0.0.1:{port}" for mode, port in ports.items()}
        for _ in range(600):
            if all(answers(f"{url}/readyz") for url in urls.values()):
                break
            time.sleep(0.2)
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.wait()
        redis.stop()


def story(chance: random.Random, max_tokens: int) -> dict[str, Any]:
    """Return a call. max_tokens: mean length of the answers; 0 lets the model end them."""
    text = f"Tell me a story about {chance.choice(SUBJECTS)} and {chance.choice(PLACES)}"
    length = round(max_tokens * chance.uniform(0.5, 1.5))
    exact = {"max_tokens": length, "ignore_eos": True, "temperature": 0} if max_tokens else {}
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "seed": chance.getrandbits(31), **exact}


async def call(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, float]:
    """Return the status of a call, and its duration in seconds."""
    began = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        await response.read()
        return response.status, time.perf_counter() - began


async def calibrate(session: aiohttp.ClientSession, url: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the median duration of a call at an idle server, and the calls per second of a full one."""
    chance = random.Random(1)
    alone = [(await call(session, url, story(chance, args.tokens)))[1] for _ in range(12)]
    until = time.perf_counter() + args.round_s

    async def keep_calling(seed: int) -> int:
        own, count = random.Random(seed), 0
        while time.perf_counter() < until:
            await call(session, url, story(own, args.tokens))
            count += time.perf_counter() < until
        return count

    counts = await asyncio.gather(*(keep_calling(seed) for seed in range(2 * args.rows)))
    return statistics.median(alone[2:]), sum(counts) / args.round_s


async def round_of(
    session: aiohttp.ClientSession, url: str, rate: float, alone_s: float, seed: object, args: argparse.Namespace
) -> Counter[str]:
    """Send calls for a round. Returns how many were met, late, refused, and sent, and the others by status."""
    chance, found = random.Random(repr(seed)), Counter[str]()
    tasks: list[asyncio.Task[None]] = []

    async def one(body: dict[str, Any]) -> None:
        status, took_s = await call(session, url, body)
        is_met = status == 200 and took_s <= body["timeout"]
        found["met" if is_met else {200: "late", 429: "refused", 504: "late"}.get(status, str(status))] += 1

    began, due = time.perf_counter(), 0.0
    while (due := due + chance.expovariate(rate)) < args.round_s:
        body = story(chance, args.tokens) | {"timeout": round(alone_s * chance.uniform(SHORTEST, LONGEST), 3)}
        await asyncio.sleep(began + due - time.perf_counter())
        tasks.append(asyncio.create_task(one(body)))
    await asyncio.gather(*tasks)
    found["sent"] = len(tasks)
    return found


async def compare(urls: dict[str, str], args: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(60)
    ) as session:
        await asyncio.sleep(2 * BEAT_S)
        for load in args.loads:
            alone_s, capacity = await calibrate(session, urls["without"], args)
            print(f"capacity {capacity:.2f} calls/s, alone {alone_s:.2f} s; load {load} of it", flush=True)
            found: dict[str, list[Counter[str]]] = {mode: [] for mode in MODES}
            for number in range(args.rounds):
                for mode in list(MODES) if number % 2 else reversed(MODES):
                    seed = (args.seed, load, number)
                    found[mode].append(await round_of(session, urls[mode], load * capacity, alone_s, seed, args))
            for mode, rounds in found.items():
                goodput = statistics.median(one["met"] / args.round_s for one in rounds)
                print(f"  {mode:9} goodput {goodput:.2f} calls/s, {dict(sum(rounds, Counter()))}")
            pairs = zip(found["with"], found["without"], strict=True)
            ratios = sorted(new["met"] / max(1, old["met"]) for new, old in pairs)
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"  ratio {statistics.median(ratios):.2f} ({spread}, {args.rounds} rounds)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PROJECT_ROOT / "models" / "demo"))
    parser.add_argument("--loads", type=lambda text: [float(part) for part in text.split(",")], default=[0.7, 1.0, 1.5])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--round-s", type=float, default=15.0)
    parser.add_argument("--rows", type=int, default=16, help="--max-num-seqs of the worker")
    parser.add_argument("--tokens", type=int, default=0, help="mean length of answers; 0 lets the model end them")
    parser.add_argument("--step-ms", type=float, default=0.0, help="a worker that computes nothing, with such steps")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"{machine()}, {quire_version()}")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder, servers(Path(folder), args) as urls:
        asyncio.run(compare(urls, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())

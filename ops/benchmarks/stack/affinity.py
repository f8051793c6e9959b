"""What prefix affinity gains and costs: four workers, one gateway that leaves requests to them and one that does not.

python -m quire.ops.benchmarks.stack.affinity                        all of it, about five minutes
python -m quire.ops.benchmarks.stack.affinity --only cost

The workers run the engine with a model that waits 200 us for each token instead of computing it, so four of them fit on
a small machine; `--token-us 0 --shape llama135m` computes.

chat      conversations of several turns: mean time to the first token with affinity, over that without
plain     single prompts that have nothing in common: the same ratio
cost      microseconds of the scripts `submit`, `read` and `claim` in Redis, with 1, 4 and 64 workers

Rounds alternate between the two gateways, which share the workers. All prompts of a round are new.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.ops.benchmarks.peers.machine import machine, quire_version
from quire.ops.benchmarks.peers.processes import answers
from quire.ops.benchmarks.stack.checkpoint import SHAPES, make_checkpoint
from quire.ops.loadgen.client import RequestRecord, encode, new_session, stream
from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.ops.local.ports import free_port
from quire.shared.process.processes import dying_with_parent
from quire.shared.protocol.broker import Admission, Broker, QueueBounds, QueueReader, StepCommit, new_id
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.broker.scripts import script_source
from quire.shared.protocol.keys import BEAT_S
from quire.shared.protocol.messages import Delta, Outcome, StepItem, WorkerCard
from quire.shared.redis.clients import command_client

PARTS = ("chat", "plain", "cost")
MODEL, WORKERS = "bench", 4
# Settings of the two gateways.
MODES = {"with": "20", "without": "0"}


@contextmanager
def servers(folder: Path, shape: str, token_us: float) -> Iterator[tuple[str, dict[str, str]]]:
    """Run Redis, the workers and the gateways. Yields the URL of Redis, and of each gateway.

    token_us: of workers that compute nothing, for each token of a step; 0 for workers that compute.
    """
    import subprocess

    model, redis = str(make_checkpoint(folder / shape, shape)), EmbeddedRedis(folder)
    redis.start()
    common = ["--redis-url", redis.url, "--served-model-name", MODEL, "--log-level", "warning"]
    commands = [["quire", "worker", model, "--worker-id", f"w{at}", "--threads", "1", *common] for at in range(WORKERS)]
    if token_us:
        flags = ["--redis-url", redis.url, "--model-name", MODEL, "--step-ms", "5", "--token-us", str(token_us)]
        clockwork = "quire.ops.benchmarks.stack.clockwork"
        commands = [[clockwork, *flags, "--worker-id", f"w{at}", "--sequences", "32"] for at in range(WORKERS)]
    ports = {mode: str(free_port()) for mode in MODES}
    commands += [
        ["quire", "gateway", model, "--port", ports[mode], "--prefix-affinity-ms", value, *common]
        for mode, value in MODES.items()
    ]
    processes = [subprocess.Popen(dying_with_parent([sys.executable, "-m", *each])) for each in commands]
    try:
        yield redis.url, {mode: f"http://127.0.0.1:{port}" for mode, port in ports.items()}
    finally:
        for process in processes:
            process.kill()
            process.wait()
        redis.stop()


async def until_ready(redis_url: str, urls: dict[str, str]) -> None:
    """Wait until all workers beat, and the gateways have seen them."""
    client = command_client(redis_url, MODEL)
    for _ in range(600):
        workers = await Broker(client, MODEL).live_workers()
        if len(workers) == WORKERS and all(answers(f"{url}/readyz") for url in urls.values()):
            break
        await asyncio.sleep(0.2)
    else:
        raise TimeoutError(f"there are not {WORKERS} workers")
    await client.aclose()
    await asyncio.sleep(2 * BEAT_S)


async def round_of(url: str, vocab: int, seed: object, args: argparse.Namespace, turns: int) -> list[float]:
    """Return the times to the first token in a round of conversations: of single prompts for one turn.

    seed: of the times; the prompts also depend on the gateway.
    """
    times: list[float] = []
    gate = asyncio.Semaphore(args.open)

    async def converse(session: Any, index: int) -> None:
        own, pauses = random.Random(repr((seed, index, url))), random.Random(repr((seed, index)))
        prompt = own.choices(range(2, vocab), k=args.prompt)
        async with gate:
            for _ in range(turns):
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
                record = RequestRecord(0, len(prompt), 16)
                await stream(session, f"{url}/v1/completions", encode(body | {"stream": True}), record)
                if not record.ok:
                    raise RuntimeError(f"{url}: {record.error}: {record.message}")
                times.append(record.ttft_s)
                prompt = [*prompt, *own.choices(range(2, vocab), k=args.turn)]
                await asyncio.sleep(pauses.expovariate(1 / args.think_s))

    async with new_session(timeout_s=None, keep_alive=True) as session:
        count = args.conversations if turns > 1 else args.conversations * args.turns // 2
        await asyncio.gather(*(converse(session, index) for index in range(count)))
    return times


async def compare(part: str, urls: dict[str, str], vocab: int, args: argparse.Namespace) -> None:
    turns = args.turns if part == "chat" else 1
    found: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    for number in range(args.rounds):
        for mode in list(MODES) if number % 2 else reversed(MODES):
            found[mode].append(await round_of(urls[mode], vocab, (part, number), args, turns))
    means = {mode: [statistics.mean(times) for times in rounds] for mode, rounds in found.items()}
    ratios = sorted(a / b for a, b in zip(means["with"], means["without"], strict=True))
    for mode, rounds in found.items():
        times = sorted(time for one in rounds for time in one)
        tail = 1000 * times[int(0.99 * (len(times) - 1))]
        mean = 1000 * statistics.mean(times)
        say(part, f"{mode:8} mean {mean:7.1f} ms, p99 {tail:7.1f} ms, {len(times)} first tokens")
    medians = {mode: statistics.median(times) for mode, times in means.items()}
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    say(part, f"with / without: {medians['with'] / medians['without']:.2f} (medians of the means of rounds; {spread})")


async def cost(requests: int) -> None:
    """Measure the scripts in Redis itself, which logs the duration of each call."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        redis = EmbeddedRedis(Path(folder))
        redis.start()
        client = command_client(redis.url, MODEL)
        scripts = ("submit", "read", "claim")
        names = {hashlib.sha1(script_source(name).encode()).hexdigest(): name for name in scripts}
        for workers in (1, 4, 64):
            for case in ("no prefixes", "unknown prefixes", "left to the holder"):
                await client.flushall()
                broker = Broker(client, MODEL)
                took = await scripts_us(broker, workers, case, requests)
                shown = ", ".join(f"{names[sha]} {us:.0f}" for sha, us in took.items() if sha in names)
                say("cost", f"{workers:2} workers, {case:18} us: {shown}")
        await client.aclose()
        redis.stop()


async def scripts_us(broker: Broker, workers: int, case: str, requests: int) -> dict[str, float]:
    """Return the median microseconds of each script while requests are served one by one."""
    client, lane = broker.client, broker.keys.lane
    await broker.create_groups()
    readers = [QueueReader(client, lane, f"w{at}") for at in range(workers)]
    for reader in readers:
        await reader.pending()
        await broker.beat(WorkerCard(reader.worker_id, reader.worker_id * 8, lane, 99, 64, 99, (2,), 16, 9, 9, 0, 0, 7))
    for name, value in (("slowlog-log-slower-than", 0), ("slowlog-max-len", 10 * requests)):
        await client.config_set(name, value)
    running = []
    for number in range(requests + 8 * workers):
        if number == 8 * workers:
            await client.slowlog_reset()
        known = case == "left to the holder" and number >= 8 * workers
        prefixes = () if case == "no prefixes" else (b"%012d" % (number % (8 * workers) if known else number),) * 3
        terms = Admission("g", QueueBounds(10**6, 10**9), cost=10, prompt_tokens=5, prefixes=prefixes, left_ms=20)
        await broker.submit(request_id := new_id(), b"x" * 500, terms)
        affinity = text(await client.hget(broker.keys.request(request_id), "affinity") or "").split(" ", 2)
        left = affinity[0] == "left"
        reader = readers[int(affinity[2][1:])] if left else readers[number % workers]
        for entry in await reader.read(8, 1000 if left else 0):
            claim = await broker.claim(entry, reader.worker_id, new_id(), reader.worker_id * 8)
            assert claim is not None
            running.append((reader.worker_id, claim))
        if len(running) > 2 * workers:  # each worker runs two
            worker, claim = running.pop(0)
            item = StepItem(claim.request_id, 0, (Delta(0, (1,), "stop"),), Outcome("stop"))
            await broker.commit_step(worker, [StepCommit(claim.attempt, item)])
    by_script: dict[str, list[int]] = {}
    for call in await client.slowlog_get(10 * requests):
        words = call["command"].split(b" ")
        if words[0] == b"EVALSHA":
            by_script.setdefault(words[1].decode(), []).append(call["duration"])
    return {sha: statistics.median(times) for sha, times in by_script.items()}


def say(part: str, text: str) -> None:
    print(f"{part:8} {text}", flush=True)


async def measure(args: argparse.Namespace) -> None:
    only = args.only.split(",") if args.only else PARTS
    facts = machine()
    say("machine", f"{facts['processor']}, {facts['cores']} cores, {facts['system']}; {quire_version()}")
    if {"chat", "plain"} & set(only):
        with (
            tempfile.TemporaryDirectory(prefix="quire-bench-") as folder,
            servers(Path(folder), args.shape, args.token_us) as (redis_url, urls),
        ):
            await until_ready(redis_url, urls)
            for part in [part for part in PARTS if part in only and part != "cost"]:
                await compare(part, urls, SHAPES[args.shape][-1], args)
    if "cost" in only:
        await cost(args.requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts, with commas between")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="shape of the random checkpoint")
    parser.add_argument(
        "--token-us",
        type=float,
        default=200.0,
        help="microseconds of a token at workers that compute nothing; 0 for workers that compute the checkpoint",
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=8, help="of a round")
    parser.add_argument("--open", type=int, default=4, help="conversations at a time")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the first prompt")
    parser.add_argument("--turn", type=int, default=64, help="tokens that each turn adds")
    parser.add_argument("--think-s", type=float, default=0.3)
    parser.add_argument("--requests", type=int, default=1000, help="requests for the costs")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

"""`make soak`: requests of all kinds on a stack whose processes are killed, stopped, drained and restarted.

The schedule of faults is seeded. Afterwards every request is repeated without faults, and the answers are compared.

make soak                                        one hour
make soak ARGS="--minutes 1"
python -m quire.ops.benchmarks.soak --minutes 10 --seed 3 --workers 3 --gateways 2

Prints requests, tokens, faults, migrations (requests that another attempt continued), repairs (published output that a
gateway missed and read from the log), fenced items, resumes, lost requests (must be 0), changed or duplicated answers
(must be 0) and the longest pause. Writes soak.json. The exit code is 1 if a request was lost or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from redis import Redis

from quire.ops.benchmarks.peers.processes import answers
from quire.ops.benchmarks.soak.chaos import Chaos, RestartedProcess
from quire.ops.benchmarks.soak.client import SoakRecord, ask
from quire.ops.benchmarks.stack.checkpoint import make_checkpoint
from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.ops.local.ports import free_port
from quire.ops.local.progress import Progress
from quire.shared.protocol.keys import GROUP, QUEUES, LaneKeys

RESULTS = Path(__file__).parents[1] / "results" / "soak"
MODEL = "soak"
KEYS = LaneKeys(MODEL)
# A request counts as lost if it has not ended this many seconds after the repair of the last fault.
GIVE_UP_S = 300.0
LEASE_S, BEAT_S = 2.0, 0.5
# Counters of recovery. The counts are lower bounds: a killed gateway loses its last counts of repairs.
RECOVERIES = ("migrations", "repairs", "fenced")


def make_body(draw: random.Random, longest: int) -> dict[str, Any]:
    """Return a random request: greedy, sampled, with penalties, with several choices, or with log-probabilities."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": draw.choices(range(2, 2048), k=draw.randint(4, 60)),
        "max_tokens": draw.randint(4, longest if draw.random() < 0.9 else 4 * longest),
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": draw.randrange(2**32),
        "temperature": draw.choice([0, 0, 0.7, 1]),
        "ignore_eos": True,
    }
    kinds: list[dict[str, Any]] = [
        {},
        {},
        {"n": 2},
        {"n": 2, "logprobs": 2},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"top_p": 0.9},
    ]
    return body | draw.choice(kinds)


async def load(
    gateways: list[str], seed: int, concurrency: int, longest: int, until: asyncio.Event, records: list[SoakRecord]
) -> None:
    """Keep `concurrency` requests open until told to stop, then wait until they end."""
    draw = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=30)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one_after_the_other() -> None:
            while not until.is_set():
                key = f"{seed}-{draw.randrange(2**60)}"
                records.append(await ask(session, gateways, key, make_body(draw, longest), GIVE_UP_S))

        await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))


async def check(gateway: str, records: list[SoakRecord], limit: int) -> list[SoakRecord]:
    """Repeat requests without faults. Return those whose text or log-probabilities differ from the first answer."""
    chosen = random.Random(0).sample(records, min(limit, len(records)))
    gate = asyncio.Semaphore(16)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def differs(record: SoakRecord) -> bool:
            body = {name: value for name, value in record.body.items() if not name.startswith("stream")}
            async with gate, session.post(f"{gateway}/v1/completions", json=body) as response:
                answer = await response.json()
            texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
            scored = {
                choice["index"]: choice["logprobs"]["token_logprobs"]
                for choice in answer["choices"]
                if choice["logprobs"]
            }
            seen = (record.text, record.logprobs, record.usage_tokens)
            return seen != (texts, scored, answer["usage"]["completion_tokens"])

        differences = await asyncio.gather(*map(differs, chosen))
    return [record for record, is_different in zip(chosen, differences, strict=True) if is_different]


async def soak(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    progress = Progress(sys.stderr)
    model = make_checkpoint(folder / "model", "tiny")
    redis_server = EmbeddedRedis(folder)
    redis_server.start()
    workers, gateways, urls = [], [], []
    common = [str(model), "--redis-url", redis_server.url, "--served-model-name", MODEL]
    lease = ["--lease-s", str(LEASE_S), "--beat-s", str(BEAT_S), "--drain-s", "0.5", "--watchdog-s", "15"]
    try:
        for index in range(args.workers):
            port = free_port()
            command = ["worker", *common, "--worker-id", f"w{index}", "--internal-port", str(port), "--threads", "1"]
            command += ["--dtype", "float32", "--max-num-seqs", "16", *lease, "--tensor-parallel-size", str(args.ranks)]
            workers.append(
                RestartedProcess(
                    f"w{index}", command, partial(answers, f"http://127.0.0.1:{port}/health"), folder / "w.log"
                )
            )
        for index in range(args.gateways):
            port = free_port()
            urls.append(f"http://127.0.0.1:{port}")
            command = ["gateway", *common, "--port", str(port), "--drain-s", "1"]
            ready = partial(answers, f"{urls[-1]}/healthz")
            gateways.append(RestartedProcess(f"g{index}", command, ready, folder / "g.log"))
        chaos = Chaos(workers, gateways, redis_server, args.seed, args.pause_s, args.ranks)
        await chaos.mend_all()
        progress.say(f"{args.workers} workers and {args.gateways} gateways are ready")
        records: list[SoakRecord] = []
        ended = asyncio.Event()
        started = time.monotonic()
        loads = asyncio.create_task(load(urls, args.seed, args.concurrency, args.longest, ended, records))
        faults = asyncio.create_task(chaos.run(ended))
        while time.monotonic() - started < 60 * args.minutes and not loads.done():
            await asyncio.sleep(5)
            progress.say(f"{len(records)} requests ended, {len(chaos.faults)} faults")
        ended.set()
        await faults
        await chaos.mend_all()
        await loads
        seconds = time.monotonic() - started
        progress.say("checking every text against one without faults")
        complete = [record for record in records if record.outcome == "complete"]
        changed = await check(urls[0], complete, args.checks)
        return {
            **report(records, chaos, seconds),
            **await state(redis_server),
            "checked": min(args.checks, len(complete)),
            "changed": len(changed),
            "changed_examples": [{"body": record.body, "text": record.text} for record in changed[:3]],
            "seed": args.seed,
        }
    finally:
        for service in (*workers, *gateways):
            service.end()
        redis_server.stop()


def report(records: list[SoakRecord], chaos: Chaos, seconds: float) -> dict[str, Any]:
    ends = Counter(record.outcome or "lost" for record in records)
    return {
        "seconds": seconds,
        "requests": len(records),
        "outcomes": dict(ends),
        "lost": ends["lost"],
        "errors": [record.error for record in records if record.outcome == "error"][:5],
        "tokens": sum(record.usage_tokens for record in records),
        "breaks": sum(record.breaks for record in records),
        "resumes": sum(record.resumes for record in records),
        "refusals": sum(record.refusals for record in records),
        "worst_pause_s": max((record.worst_pause_s for record in records), default=0.0),
        "faults": [asdict(fault) for fault in chaos.faults],
        "fault_counts": dict(Counter(fault.what for fault in chaos.faults)),
    }


async def state(redis_server: EmbeddedRedis) -> dict[str, Any]:
    """Return the counters in Redis, after all requests have ended."""
    with Redis.from_url(redis_server.url) as client:
        for _ in range(200):
            load = [int(count) for count in client.hvals(KEYS.load)]
            pending = sum(
                client.xpending(KEYS.queue(name), GROUP)["pending"]
                for name in QUEUES
                if client.exists(KEYS.queue(name))
            )
            if not any(load) and not pending:
                break
            await asyncio.sleep(0.1)
        totals = {name.decode(): int(count) for name, count in client.hgetall(KEYS.totals).items()}
        recoveries = {name.decode(): int(count) for name, count in client.hgetall(KEYS.recoveries).items()}
    accepted = totals.pop("accepted", 0)
    totals.pop("arrivals", None)
    counts = {name: recoveries.get(name, 0) for name in RECOVERIES}
    return {"accepted": accepted, "totals": totals, "pending": pending, "load": load, **counts}


def is_good(result: dict[str, Any]) -> bool:
    return (
        result["lost"] == 0
        and result["changed"] == 0
        and set(result["outcomes"]) <= {"complete"}
        and result["accepted"] == sum(result["totals"].values())
        and result["pending"] == 0
        and not any(result["load"])
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of load and faults")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the model of each worker: 1, 2 or 4")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=16, help="requests that are open at once")
    parser.add_argument(
        "--longest",
        type=int,
        default=96,
        help="tokens of nine answers in ten, at most; the tenth may have four times as many",
    )
    parser.add_argument("--pause-s", type=float, default=8.0, help="seconds between two faults, on average")
    parser.add_argument("--checks", type=int, default=2000, help="answers that are compared, at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-soak-") as folder:
        result = asyncio.run(soak(args, Path(folder)))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    shown = ("requests", "outcomes", "tokens", "fault_counts", "breaks", "resumes", "refusals", "lost", "checked")
    for name in (*shown, "changed", *RECOVERIES, "worst_pause_s", "accepted", "totals", "errors"):
        print(f"{name}: {result[name]}")
    return 0 if is_good(result) else 1


if __name__ == "__main__":
    sys.exit(main())

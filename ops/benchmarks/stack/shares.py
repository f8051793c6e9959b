"""Fair sharing: the time of its decisions in Redis, and the first token of a tenant among many and during a flood.

python -m quire.ops.benchmarks.stack.shares                    two minutes
python -m quire.ops.benchmarks.stack.shares --parts scripts    the scripts alone

scripts  Redis' own time per call of `submit`, without a key and with limits of a key, its project and its organisation;
         and per request in a step of `commit_step`, with one tenant, with one for each request, and without tenants
first    time to the first token while 1,000 tenants send, against one tenant at the same rate, in alternating rounds
flood    time to the first token of a tenant behind 10,000 queued requests of another one, against the same tenant alone

`first` and `flood` run Redis, a gateway and a worker that computes nothing (`clockwork.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from redis.asyncio import Redis

from quire.gateway.stream.call_metadata import CallMetadata
from quire.ops.benchmarks.stack.flood import first_tokens
from quire.ops.benchmarks.stack.pair import spread
from quire.ops.benchmarks.stack.pair_processes import Pair, pair
from quire.ops.benchmarks.stack.stream_client import MODEL, Stream, open_stream
from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.shared.accounts.account import Account
from quire.shared.accounts.charge import Charge
from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from quire.shared.broker import Broker, QueueBounds, QueueReader, StepCommit, new_id
from quire.shared.keys import ACCOUNTS_TAG
from quire.shared.messages import Delta, GenerationRequest, SamplingParams, StepItem
from quire.shared.redis.clients import command_client
from quire.shared.share import Share

PARTS = ("scripts", "first", "flood")
TENANTS = 1000
QUEUED = 10_000
BOUNDS = QueueBounds(10**7, 10**12)
LIMITS = AccountLimits(
    requests_per_minute=10**9,
    tokens_per_minute=10**10,
    concurrent_requests=10**9,
    tokens_per_day=10**15,
    tokens_per_month=10**15,
)
ROWS, STEP_MS, TOKENS = 16, 20.0, 20
PROMPT = (2, 3, 4)
METADATA = CallMetadata("completion", 1_800_000_000, 1, True, (), len(PROMPT), 1, False).encode()


async def submit(broker: Broker, share: Share, charge: Charge | None = None, max_tokens: int = TOKENS) -> None:
    request = GenerationRequest(new_id(), MODEL, PROMPT, SamplingParams(max_tokens, temperature=0, ignore_eos=True))
    await broker.submit(
        request.id,
        request.encode(),
        gateway="0" * 32,
        cost=request.cost,
        bounds=BOUNDS,
        metadata=METADATA,
        is_background=True,
        prompt_tokens=len(PROMPT),
        share=share,
        charge=charge,
    )


def charge_of(index: int) -> Charge:
    names = (("key", f"{index:016x}"), ("project", f"acme/{index}"), ("organisation", "acme"))
    return Charge(tuple(Account(kind=kind, id=name, name="x", limits=LIMITS) for kind, name in names), MODEL)  # type: ignore[arg-type]


async def script_us(client: Redis) -> float:
    """Microseconds per call of a script since the last call of this function, by Redis' own clock."""
    stats = await client.info("commandstats")
    await client.config_resetstat()
    return float(stats["cmdstat_evalsha"]["usec_per_call"]) if "cmdstat_evalsha" in stats else 0.0


async def scripts(rounds: int, url: str) -> None:
    client = command_client(url)
    broker = Broker(client, MODEL)
    submits: dict[str, list[list[float]]] = {}
    commits: dict[str, list[list[float]]] = {}
    for _ in range(rounds):
        for name, tenants, is_charged in (
            ("no key, nothing waits", 0, False),
            ("no key, one tenant waits", 1, False),
            ("key with limits, one tenant waits", 1, True),
            (f"key with limits, {TENANTS:,} tenants wait", TENANTS, True),
        ):
            await client.flushdb()
            await broker.create_groups()
            for index in range(2 * tenants):
                await submit(broker, Share(f"acme/{index // 2}"))
            reader = QueueReader(client, MODEL, "w")
            times = []
            for index in range(500):
                share = Share(f"acme/{index % TENANTS}" if is_charged else "acme/0")
                charge = charge_of(index % TENANTS) if is_charged else None
                await script_us(client)
                await submit(broker, share, charge)
                times.append(await script_us(client))
                if not tenants:
                    await reader.read(1, 0)
            submits.setdefault(name, []).append(times)
        for name, tenants in (("no tenants", 0), ("one tenant", 1), ("256 tenants", 256)):
            commits.setdefault(name, []).append(await commit_us(broker, tenants))
    for name, found in submits.items():
        print(f"scripts  submit, {name}: {_deciles(found)}")
    for name, found in commits.items():
        print(f"scripts  commit_step of 256 requests, {name}, per request: {_deciles(found)}")
    await client.aclose()


async def commit_us(broker: Broker, tenants: int, requests: int = 256, steps: int = 60) -> list[float]:
    """Microseconds of Redis per request of each step. tenants: 0 removes what the charge needs."""
    client = broker.client
    await client.flushdb()
    await broker.create_groups()
    for index in range(requests):
        await submit(broker, Share(f"acme/{index % max(1, tenants)}"))
    claims = []
    for delivery in await QueueReader(client, MODEL, "w").read(requests, 0):
        claim = await broker.claim(delivery, "w", new_id())
        assert claim is not None
        claims.append(claim)
        if not tenants:
            await client.hdel(broker.keys.request(claim.request_id), "tenant")
    times = []
    for step in range(steps):
        items = [StepItem(claim.request_id, step, (Delta(0, (7,)),)) for claim in claims]
        commits = [StepCommit(claim.attempt, item) for claim, item in zip(claims, items, strict=True)]
        await script_us(client)
        await broker.commit_step("w", commits)
        times.append(await script_us(client) / requests)
    return times


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _deciles(rounds: Sequence[Sequence[float]]) -> str:
    """The median over rounds, and their range, of the lowest decile and of the median of the calls.

    Redis counts the time in which other processes have its core; the lowest decile has little of it.
    """
    lowest = [statistics.quantiles(times, n=10)[0] for times in rounds]
    return f"lowest decile {_range(lowest)}, median {_range([statistics.median(times) for times in rounds])} us"


async def keys(redis_url: str, count: int) -> list[str]:
    """Make a project with a key, `count` times."""
    client = command_client(redis_url, ACCOUNTS_TAG)
    store = AccountStore(client, "benchmark")
    made = [(await store.create("acme", f"p{index}", "k", AccountLimits()))[1] for index in range(count)]
    await client.aclose()
    return made


async def first(rounds: int, seconds: float, load: float, seed: int) -> None:
    rate = load * 1000 * ROWS / (STEP_MS * TOKENS)
    draw = random.Random(seed)
    async with pair(STEP_MS, ROWS, ["--max-queued-requests", "100000"]) as found:
        made = await keys(found.redis.url, TENANTS)
        await offer(found.port, rate, 2, draw, made)
        print(f"first    {rate:g} requests/s, {100 * load:g} % of the capacity, rounds of {seconds:g} s", flush=True)
        ratios: dict[str, list[float]] = {"p50": [], "p99": []}
        for number in range(rounds):
            pools = [("one tenant", made[:1]), (f"{TENANTS:,} tenants", made)]
            times = {}
            for name, pool in pools if number % 2 == 0 else reversed(pools):
                times[name] = sorted(first_tokens(await offer(found.port, rate, seconds, draw, pool)))
                print(f"first    {name:13} {spread(times[name])}", flush=True)
            one, many = (times[name] for name, _ in pools)
            for name, place in (("p50", 0.5), ("p99", 0.99)):
                ratios[name].append(many[int(place * (len(many) - 1))] / one[int(place * (len(one) - 1))])
        for name, values in ratios.items():
            print(f"first    {TENANTS:,} tenants against one, {name}: {_range(values)}")


async def offer(port: int, rate: float, seconds: float, draw: random.Random, pool: list[str]) -> list[Stream]:
    """Send requests at `rate` per second for `seconds`, each with a random key of the pool."""
    sent: list[Stream] = []
    start = at = time.monotonic()
    while (at := at + draw.expovariate(rate)) < start + seconds:
        await asyncio.sleep(at - time.monotonic())
        sent.append(await open_stream(port, TOKENS, len(sent), draw.choice(pool)))
    await asyncio.gather(*(stream.ended for stream in sent))
    return sent


async def flood(rounds: int) -> None:
    alone, behind, services = [], [], []
    for _ in range(rounds):
        async with pair(STEP_MS, ROWS, ["--max-queued-requests", "100000"]) as found:
            [key] = await keys(found.redis.url, 1)
            await time_of_first(found, key)
            alone += [await time_of_first(found, key) for _ in range(10)]
            client = command_client(found.redis.url)
            broker = Broker(client, MODEL)
            for _ in range(QUEUED):
                await submit(broker, Share("acme/flood"))
            began, before = time.monotonic(), (await broker.read_totals()).get("length", 0)
            behind += [await time_of_first(found, key) for _ in range(10)]
            ended = (await broker.read_totals()).get("length", 0) - before - 10
            services.append(ROWS * (time.monotonic() - began) / ended)
            waiting, _ = await broker.queued()
            assert waiting > ROWS, "the flood was over too soon"
            await client.aclose()
    print(f"flood    alone: {spread(alone)}")
    print(f"flood    behind {QUEUED:,} requests of another tenant: {spread(behind)}")
    service_s = statistics.median(services)
    bound = 1.2 * statistics.median(alone) + service_s
    print(f"flood    time that a request of the flood has a row: {1000 * service_s:.1f} ms")
    print(f"flood    1.2 times the median alone and that time: {1000 * bound:.1f} ms")


async def time_of_first(found: Pair, key: str) -> float:
    stream = await open_stream(found.port, 1, 0, key)
    await stream.ended
    await asyncio.sleep(0.02)
    return first_tokens([stream])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a round of `first`")
    parser.add_argument("--load", type=float, default=0.5, help="load of `first`, as a part of the capacity")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if "scripts" in parts:
            with tempfile.TemporaryDirectory(prefix="quire-") as folder:
                server = EmbeddedRedis(Path(folder))
                server.start()
                try:
                    runner.run(scripts(args.rounds, server.url))
                finally:
                    server.stop()
        if "first" in parts:
            runner.run(first(args.rounds, args.seconds, args.load, args.seed))
        if "flood" in parts:
            runner.run(flood(args.rounds))


if __name__ == "__main__":
    main()

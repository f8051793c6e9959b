"""The stack in real containers: built, scaled, with workers killed and everything stopped in the middle of streams.

Minutes, most of them for the first build: `make containers`. Each test continues with the stack of the previous one.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from quire.ops.benchmarks.soak.client import SoakRecord
from quire.ops.tools.compose import VARIABLES
from tests.support.containers import Clients, Stack, docker, get_json, until, why_no_engine

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

FIRST_TOKEN_S = 30.0
# Long enough to be in the middle of them for a part of a second at least.
BODIES: list[dict[str, Any]] = [
    {
        "model": "demo",
        "prompt": f"Chapter {index}. Once upon a time",
        "max_tokens": 700,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": index,
        "stream": True,
    }
    for index in range(12)
]
OURS = ("redis", "gateway", "worker", "prometheus")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if reason := why_no_engine():
        pytest.skip(reason)
    stack = Stack(tmp_path_factory.mktemp("stack") / "empty.env")
    stack.compose("build", *OURS)
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[str]]:
    """The texts of BODIES when nothing happens, put here by the first test that knows them."""
    return {}


def differences(found: list[str], wanted: list[str]) -> list[str]:
    """The texts that differ, their lengths, and the place of the first difference."""
    said = []
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one != other:
            at = next(
                (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                min(len(one), len(other)),
            )
            around = slice(max(0, at - 40), at + 40)
            said.append(f"{index}: {len(one)} and {len(other)} long, at {at}: {one[around]!r} and {other[around]!r}")
    return said


async def in_the_middle(urls: Sequence[str], name: str, texts: Sequence[str], count: int = len(BODIES)) -> Clients:
    """Return clients of the first `count` requests, each of which has streamed a bit and none all of its answer.

    Quick answers may be over before all have begun. They have their texts, and the next clients ask.
    """
    for attempt in range(10):
        clients = Clients(urls, f"{name}-{attempt}", BODIES[:count])
        await until(lambda records=clients.records: all(map(has_begun, records)), "every stream has begun", poll_s=0.01)
        if not any(record.outcome for record in clients.records):
            return clients
        assert differences(await clients.texts(), texts[:count]) == []
    raise AssertionError("a stream was over each time; it was to be in the middle")


def has_begun(record: SoakRecord) -> bool:
    return len(record.tokens_at) > 10 or bool(record.outcome)


def test_images_hold_what_they_need_and_run_without_rights(stack: Stack) -> None:
    def run(image: str, script: str) -> str:
        return docker("run", "--rm", "--network", "none", "--entrypoint", "sh", f"quire-{image}:local", "-c", script)

    names = "('torch', 'numpy', 'pip', 'opentelemetry')"
    find = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    assert run("gateway", f'python -c "{find}"') == "['opentelemetry']"
    assert run("worker", f'python -c "{find}"') == "['torch', 'numpy', 'opentelemetry']"
    levels = "import quire.kernels.cpu.build as b; print(*map(b.find, (b.COMMON, *b.LEVELS)), sep=chr(10))"
    assert all(path.startswith("/opt/venv/") for path in run("worker", f"python -c '{levels}'").splitlines())
    assert all(run(image, "id -u; id -g").split() == ["10001"] * 2 for image in OURS)

    below = next(entry.default for entry in VARIABLES if entry.name == "PYTHON_IMAGE")
    base, gateway = (
        int(docker("image", "inspect", "--format", "{{.Size}}", image)) for image in (below, "quire-gateway:local")
    )
    print(f"\ngateway {gateway / 1e6:.0f} MB, {(gateway - base) / 1e6:.0f} MB of them ours")
    # The whole image must stay below 400 MB. The published base image has 130 MB.
    assert gateway - base < 200e6


async def test_the_first_token_comes_soon_after_up(stack: Stack, undisturbed: dict[str, list[str]]) -> None:
    began = time.monotonic()
    starting = asyncio.create_task(asyncio.to_thread(stack.up))
    clients = Clients(await stack.gateways(1), "first", BODIES[:1])
    await until(lambda: clients.records[0].tokens_at, "a first token")
    took_s = clients.records[0].tokens_at[0] - began
    await starting
    print(f"\nfirst token {took_s:.1f} s after `up`")
    assert took_s < FIRST_TOKEN_S
    assert len(await clients.texts()) == 1


async def test_a_chat_streams(stack: Stack) -> None:
    (url,) = await stack.gateways(1)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Tell me a story about a heron."}],
            temperature=0,  # drawn by chance, the story may be about an owl
            stream=True,
        )
        pieces = [chunk.choices[0] async for chunk in stream]
    assert len(pieces) > 10
    assert "heron" in "".join(piece.delta.content or "" for piece in pieces)
    assert pieces[-1].finish_reason in ("stop", "length")


async def test_an_answer_follows_a_schema(stack: Stack) -> None:
    """A gateway tries schemas in a process of its own, here in a container that may do next to nothing."""
    kinds = {"type": "object", "properties": {"kind": {"enum": ["sad", "happy"]}}, "required": ["kind"]}
    asked: Any = {
        "type": "json_schema",
        "json_schema": {"name": "kinds", "schema": kinds | {"additionalProperties": False}},
    }
    messages: Any = [{"role": "user", "content": "Tell me a story about a heron."}]
    (url,) = await stack.gateways(1)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="demo", messages=messages, response_format=asked)
        assert json.loads(answer.choices[0].message.content or "")["kind"] in ("sad", "happy")
        asked["json_schema"]["schema"] = {"type": "integer", "multipleOf": 1_000_003}
        with pytest.raises(openai.BadRequestError, match="too large, or takes too long"):
            await client.chat.completions.create(model="demo", messages=messages, response_format=asked)


async def test_every_container_becomes_healthy(stack: Stack) -> None:
    for service in OURS:
        for container in stack.containers(service):

            def state(container: str = container) -> str:
                return str(stack.inspect(container)["State"]["Health"]["Status"])

            await until(lambda state=state: state() == "healthy", f"{service} is healthy")


def test_containers_can_do_no_harm(stack: Stack) -> None:
    for service in OURS:
        (container,) = stack.containers(service)
        host = stack.inspect(container)["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert docker("exec", container, "grep", "CapEff", "/proc/1/status").split()[1] == "0" * 16
        wrote = docker("exec", container, "sh", "-c", "touch /somewhere 2>&1 || true")
        assert "Read-only file system" in wrote


def test_the_queue_asks_for_a_password_and_is_not_published(stack: Stack) -> None:
    (redis,) = stack.containers("redis")
    assert not any(stack.inspect(redis)["NetworkSettings"]["Ports"].values())
    assert "NOAUTH" in docker("exec", redis, "redis-cli", "ping")
    # Users of the engine can read the configuration and the logs of containers: the password is in neither.
    password = docker("exec", redis, "cat", "/run/quire/redis-password")
    assert len(password) >= 32
    assert all(
        password not in docker("inspect", container) + docker("logs", container)
        for service in OURS
        for container in stack.containers(service)
    )
    ask = 'REDISCLI_AUTH=$(cat /run/quire/redis-password) redis-cli config get "$0"'
    for name, value in (("appendonly", "yes"), ("maxmemory-policy", "noeviction"), ("maxmemory", str(1024**3))):
        assert docker("exec", redis, "sh", "-c", ask, name).split() == [name, value]


async def test_it_scales(stack: Stack) -> None:
    await asyncio.to_thread(stack.up, worker=4, gateway=2)
    for url in await stack.gateways(2):

        async def ready(url: str = url) -> bool:
            state = await get_json(f"{url}/readyz")
            return state is not None and state["ready"] and state["workers"] == 4

        await until(ready, f"{url} sees four workers")

    async def scraped() -> bool:
        found = await get_json(f"{stack.prometheus_url}/api/v1/query?query=sum(up{{job='worker'}})")
        return found is not None and [item["value"][1] for item in found["data"]["result"]] == ["4"]

    await until(scraped, "Prometheus scrapes four workers")

    async def alike() -> bool:
        query = "count by (weights, results) (quire_worker_info{weights!='',results!=''})"
        found = await get_json(f"{stack.prometheus_url}/api/v1/query?query={query}")
        return found is not None and [item["value"][1] for item in found["data"]["result"]] == ["4"]

    await until(alike, "four workers compute the same")


async def test_a_killed_worker_costs_no_token(stack: Stack, undisturbed: dict[str, list[str]]) -> None:
    urls = await stack.gateways(2)
    undisturbed["texts"] = await Clients(urls, "undisturbed", BODIES).texts()
    for attempt in range(5):  # where answers are quick they may have ended before it is known who has them
        clients = await in_the_middle(urls, f"killed{attempt}", undisturbed["texts"])
        counts = await asyncio.gather(
            *(asyncio.to_thread(lambda w=w: (stack.running_requests(w), w)) for w in stack.containers("worker"))
        )
        running, victim = max(counts)
        if running:
            break
        assert differences(await clients.texts(), undisturbed["texts"]) == []
    assert running > 0
    docker("kill", "--signal", "KILL", victim)
    assert differences(await clients.texts(), undisturbed["texts"]) == []
    assert not any(record.breaks for record in clients.records), "clients notice nothing but a pause"
    pause_s = max(record.worst_pause_s for record in clients.records)
    print(f"\nkilled a worker with {running} requests; longest pause {pause_s:.1f} s")


async def test_a_stop_lets_end_what_runs(stack: Stack, undisturbed: dict[str, list[str]]) -> None:
    clients = await in_the_middle(await stack.gateways(2), "stopped", undisturbed["texts"], 2)
    stopping = asyncio.create_task(asyncio.to_thread(stack.compose, "stop"))
    assert differences(await clients.texts(), undisturbed["texts"][:2]) == []
    assert not any(record.breaks for record in clients.records)
    await stopping


async def test_a_stop_in_the_middle_loses_no_request(stack: Stack, undisturbed: dict[str, list[str]]) -> None:
    stack.set(QUIRE_DRAIN_S="0.5")
    await asyncio.to_thread(stack.up, worker=2, gateway=2)
    urls = await stack.gateways(2)
    for attempt in range(5):  # the fastest may have ended before the stop reaches their workers
        clients = await in_the_middle(urls, f"cut{attempt}", undisturbed["texts"])
        await asyncio.to_thread(stack.compose, "stop")
        are_cut = all(record.breaks and not record.outcome for record in clients.records)
        await asyncio.to_thread(stack.compose, "start")
        urls[:] = await stack.gateways(2)
        assert differences(await clients.texts(), undisturbed["texts"]) == []
        if are_cut:
            break
    assert are_cut, "all are in the middle, and are cut off"
    assert all(record.resumes for record in clients.records)


async def test_a_killed_redis_loses_nothing(stack: Stack, undisturbed: dict[str, list[str]]) -> None:
    clients = await in_the_middle(await stack.gateways(2), "redis", undisturbed["texts"])
    (redis,) = stack.containers("redis")
    docker("kill", "--signal", "KILL", redis)
    await asyncio.to_thread(stack.compose, "start", "redis")
    assert differences(await clients.texts(), undisturbed["texts"]) == []
    ask = "REDISCLI_AUTH=$(cat /run/quire/redis-password) redis-cli info persistence"
    for _ in range(20):
        said = dict(line.split(":") for line in docker("exec", redis, "sh", "-c", ask).splitlines() if ":" in line)
        if int(said["aof_last_rewrite_time_sec"]) >= 0:
            return
        await asyncio.sleep(0.5)
    pytest.fail("its file is written anew at every start")


async def test_settings_of_the_env_file_reach_the_processes(stack: Stack) -> None:
    # No collector listens at this address. Failed exports must not disturb the service.
    stack.set(QUIRE_LOG_FORMAT="json", QUIRE_OTLP_ENDPOINT="http://127.0.0.1:9", QUIRE_LOG_PROMPTS="true")
    await asyncio.to_thread(stack.up, worker=1, gateway=1)
    body = BODIES[0] | {"max_tokens": 5}
    assert await Clients(await stack.gateways(1), "logged", [body]).texts()
    for service in ("gateway", "worker"):
        (container,) = stack.containers(service)
        lines = [json.loads(line) for line in docker("logs", container).splitlines()]
        assert "traces go to http://127.0.0.1:9/v1/traces" in [line["msg"] for line in lines]
        said = any(body["prompt"] in str(line) for line in lines)
        assert said is (service == "gateway"), "only the gateway was asked to log prompts"


def test_a_wrong_setting_ends_a_container_with_its_name(stack: Stack) -> None:
    for service, name in (("gateway", "QUIRE_MAX_N"), ("worker", "QUIRE_BLOCK_SIZE")):
        command = ("docker", "run", "--rm", "--env", f"{name}=seven", f"quire-{service}:local")
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert f"'seven' from {name} is not" in done.stderr


def test_down_leaves_nothing(stack: Stack) -> None:
    stack.compose("down", "--volumes")
    for kind in (("ps", "--all"), ("volume", "ls"), ("network", "ls")):
        assert docker(*kind, "--quiet", "--filter", f"label=com.docker.compose.project={stack.project}") == ""

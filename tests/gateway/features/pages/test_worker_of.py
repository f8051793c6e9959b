"""`/worker-of`: who may have the worker of a chat killed, and what is told of it."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from quire.gateway.features.pages.worker_of import FORWARDED
from quire.shared.process.kill_pipe import KILL_PIPE, KillRequests
from quire.shared.protocol.messages import Delta, GenerationRequest
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps
from tests.support.gateway.running import Reply, RunningGateway, chat_body, raw_request, tokens, until

UNKNOWN = "chatcmpl-" + "0" * 32


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> KillRequests:
    """The pipe of a `quire serve` whose only worker is w1."""
    kills = KillRequests(["w1"])
    for name, value in kills.environ.items():
        monkeypatch.setenv(name, value)
    return kills


async def ask(gateway: RunningGateway, method: str, path: str, **changes: str) -> Reply:
    """Call as the chat page does, but for some headers; an empty one is left out."""
    host = f"127.0.0.1:{gateway.port}"
    headers = {"Host": host, "Sec_Fetch_Site": "same-origin"}
    if method == "POST":
        headers["Origin"] = f"http://{host}"
    return await gateway.send(raw_request(method, path, headers={**headers, **changes}))


async def stays(request: GenerationRequest) -> Steps:
    """Answer until the request is cancelled."""
    [token, *_] = tokens("a")
    while True:
        yield (Delta(0, (token,)),), None
        await asyncio.sleep(0.02)


async def begun(gateway: RunningGateway) -> str:
    """Return the id of a chat that a worker is writing."""
    async with gateway.stream("/v1/chat/completions", chat_body(stream=True, background=True)) as stream:
        _, first = await stream.take(2)
    call_id: str = first.data["id"]
    return call_id


async def test_the_page_has_the_worker_of_its_answer_killed(kills: KillRequests, start_gateway: Start) -> None:
    gateway = await start_gateway()
    assert (await ask(gateway, "GET", "/worker-of")).json == {"workers": ["w1"]}
    async with gateway.worker(stays, worker_id="w1"):
        chat = await begun(gateway)
        assert (await ask(gateway, "GET", f"/worker-of/{chat}")).json == {"worker": "w1", "resumed": []}
        broker = gateway.gateway.broker
        key = broker.keys.request(chat.removeprefix("chatcmpl-"))
        # A request that is claimed again before its first token has lost nothing. A long history lacks its beginning.
        events = (
            "8 claimed 1 w1",
            "9 released 3 w1",
            "9 claimed 0 w2",
            "9 claimed 2 w1",
            "9 claimed 2 w2",
            "9 claimed 5 w1",
        )
        await broker.client.hset(key, "history", "".join(f"{event}\n" for event in events))
        assert (await ask(gateway, "GET", f"/worker-of/{chat}")).json["resumed"] == [1, 2, 5]
        reply = await ask(gateway, "POST", f"/worker-of/{chat}/kill")
        assert (reply.status, reply.json) == (200, {"worker": "w1"})
        assert kills.read() == ["w1"]
        await gateway.post(f"/v1/chat/completions/{chat}/cancel", b"")

        async def has_ended() -> bool:
            return bool((await ask(gateway, "GET", f"/worker-of/{chat}")).json["worker"] is None)

        await until(has_ended)
        refused = await ask(gateway, "POST", f"/worker-of/{chat}/kill")
        assert (refused.status, refused.error["code"]) == (409, "not_killed")
    assert (await ask(gateway, "POST", f"/worker-of/{UNKNOWN}/kill")).status == 404
    assert kills.read() == []


async def test_the_next_worker_of_the_name_is_not_killed_before_it_runs_the_answer(
    kills: KillRequests, start_gateway: Start
) -> None:
    gateway = await start_gateway()

    async def kill() -> tuple[int, list[str]]:
        reply = await ask(gateway, "POST", f"/worker-of/{chat}/kill")
        assert reply.status == 200 or reply.error["code"] == "not_killed"
        return reply.status, kills.read()

    async with gateway.worker(stays, worker_id="w1") as fake:
        chat = await begun(gateway)
        assert await kill() == (200, ["w1"])
        assert await kill() == (409, []), "the next worker has not registered yet"
        request = fake.broker.keys.request(chat.removeprefix("chatcmpl-"))
        await fake.broker.client.hset(request, "incarnation", "one that another gateway had killed")
        assert await fake.broker.enlist("w1", "next", "", 1, before="w1")
        assert await kill() == (409, []), "the next worker has not claimed the answer yet"
        await fake.broker.client.hset(request, "incarnation", "next")
        assert await kill() == (200, ["w1"])


async def test_a_worker_that_somebody_else_started_is_not_killed(kills: KillRequests, start_gateway: Start) -> None:
    gateway = await start_gateway()
    async with gateway.worker(stays, worker_id="other"):
        chat = await begun(gateway)
        reply = await ask(gateway, "POST", f"/worker-of/{chat}/kill")
        assert (reply.status, reply.error["message"]) == (
            409,
            "Worker other was not started by this `quire serve`, so it was not killed.",
        )
    assert kills.read() == []


FOREIGN = [
    {"Sec_Fetch_Site": "cross-site", "Origin": "http://evil.example"},
    {"Sec_Fetch_Site": "same-site", "Origin": "http://127.0.0.1:1"},
    {"Sec_Fetch_Site": "none"},
    {"Sec_Fetch_Site": ""},
    {"Origin": "null"},
    {"Origin": "http://evil.example"},
    # A name of another site that points to this machine.
    {"Host": "evil.example", "Origin": "http://evil.example"},
    {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
    {"Host": "127.0.0.1.evil.example:8000", "Origin": "http://127.0.0.1.evil.example:8000"},
    *({name.replace("-", "_"): "203.0.113.7"} for name in FORWARDED),
]


@pytest.mark.parametrize("changes", FOREIGN, ids=str)
async def test_for_other_sites_and_behind_proxies_there_is_nothing(
    kills: KillRequests, start_gateway: Start, changes: dict[str, str]
) -> None:
    gateway = await start_gateway()
    async with gateway.worker(stays, worker_id="w1"):
        chat = await begun(gateway)
        for method, path in (("GET", "/worker-of"), ("GET", f"/worker-of/{chat}"), ("POST", f"/worker-of/{chat}/kill")):
            reply = await ask(gateway, method, path, **changes)
            assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert kills.read() == []


async def test_a_post_without_an_origin_kills_nothing(kills: KillRequests, start_gateway: Start) -> None:
    gateway = await start_gateway()
    async with gateway.worker(stays, worker_id="w1"):
        chat = await begun(gateway)
        assert (await ask(gateway, "POST", f"/worker-of/{chat}/kill", Origin="")).status == 404
        # Nor can it be asked for by a call that a browser makes without asking its user: another method.
        assert (await ask(gateway, "GET", f"/worker-of/{chat}/kill")).status in (404, 405)
    assert kills.read() == []


@pytest.mark.parametrize(
    "settings", [{"require_keys": True, "admin_key": "0123456789abcdef"}, {"host": "0.0.0.0", "allow_anonymous": True}]
)
async def test_a_server_with_keys_or_for_other_machines_has_no_such_path(
    kills: KillRequests, start_gateway: Start, settings: dict[str, Any]
) -> None:
    gateway = await start_gateway(**settings)
    admin = {"Authorization": "Bearer 0123456789abcdef"}
    assert (await ask(gateway, "GET", "/worker-of", **admin)).status in (401, 404)
    assert not any("worker-of" in str(route.resource) for route in gateway.app.router.routes())


@pytest.mark.parametrize("value", ["", "x", "{}", '{"descriptor": "x", "workers": []}', '{"descriptor": 5}', "[]"])
async def test_without_a_pipe_there_is_no_such_path(
    monkeypatch: pytest.MonkeyPatch, start_gateway: Start, value: str
) -> None:
    monkeypatch.setitem(os.environ, KILL_PIPE, value)
    gateway = await start_gateway()
    assert (await ask(gateway, "GET", "/worker-of")).status == 404

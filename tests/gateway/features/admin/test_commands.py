"""Commands and routes for operators: API keys, dead letters and parked requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from quire.gateway.features.admin import dead_letters
from quire.gateway.features.admin.commands import DeadLetterSettings
from quire.gateway.features.keys import api_keys
from quire.gateway.features.keys.commands import KEYS
from quire.gateway.features.keys.key_settings import (
    AuditKeys,
    BackUpKeys,
    CreateKey,
    KeyRedis,
    LimitAccount,
    ListKeys,
    RestoreKeys,
    RevokeKey,
    RotateKey,
    ShowAccount,
    UsageSettings,
)
from quire.gateway.features.parking import parked_requests
from quire.gateway.features.parking.commands import ParkingSettings
from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.secret import key_id_of
from quire.shared.accounts.store import AccountStore
from quire.shared.config.command_line import CommandError, run_command
from quire.shared.config.settings import options
from quire.shared.protocol.broker import Admission, Broker, QueueBounds, QueueReader, new_id
from quire.shared.protocol.keys import LaneKeys
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.shared.redis.clients import command_client
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, tokens, until

# --- `quire keys` with a real Redis -----------------------------------------------------------------------------------


def act(command: type[KeyRedis], redis_url: str, **settings: Any) -> int:
    return api_keys.run(command(redis_url=redis_url, **settings), {})


def test_a_key_from_its_creation_to_its_end(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    act(ListKeys, redis_url)
    assert "there is no API key" in capsys.readouterr().err
    act(CreateKey, redis_url, name="ci", project="web", requests_per_minute=5, models="a, b")
    secret = capsys.readouterr().out.strip()
    key_id = key_id_of(secret)
    act(LimitAccount, redis_url, id=key_id, tokens_per_day=100, requests_per_minute=0)
    limits = json.loads(capsys.readouterr().out)["limits"]
    assert limits == {"models": ["a", "b"], "tokens_per_day": 100}
    act(LimitAccount, redis_url, project="web", cost_per_day=0.5)
    assert json.loads(capsys.readouterr().out)["limits"] == {"cost_per_day": 0.5}
    act(LimitAccount, redis_url, project="web", weight=300)
    assert json.loads(capsys.readouterr().out)["limits"] == {"cost_per_day": 0.5, "weight": 300}
    with pytest.raises(CommandError, match="--weight: weight must be set for a project"):
        act(LimitAccount, redis_url, id=key_id, weight=300)
    act(RotateKey, redis_url, id=key_id)
    other = capsys.readouterr().out.strip()
    assert key_id_of(other) == key_id != secret
    act(RevokeKey, redis_url, id=key_id)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["revoked"] > 0
    assert f"refuse the key {key_id} within a second, and end its open calls" in printed.err
    act(ListKeys, redis_url)
    listed = capsys.readouterr().out
    assert f"{key_id}  default/web  ci  revoked" in listed
    act(AuditKeys, redis_url)
    audit = capsys.readouterr().out
    assert len(audit.splitlines()) == 6
    assert secret[26:] not in listed + audit
    act(UsageSettings, redis_url)
    assert capsys.readouterr().out.startswith("date,key,model")


def test_each_command_on_keys_prints_json(redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(command: type[KeyRedis], **settings: Any) -> Any:
        act(command, redis_url, json=True, **settings)
        return json.loads(capsys.readouterr().out)

    key_id = key_id_of(said(CreateKey)["key"])
    for command in (RotateKey, ShowAccount, LimitAccount, RevokeKey):
        assert said(command, id=key_id)["id"] == key_id
    assert [account["id"] for account in said(ListKeys)] == [key_id]
    assert {entry["action"] for entry in said(AuditKeys)} >= {"create", "rotate", "revoke"}
    assert said(UsageSettings) == []
    file = str(tmp_path / "keys.json")
    assert said(BackUpKeys, file=file) == {"file": file}
    with Redis.from_url(redis_url) as client:
        client.flushall()
    assert said(RestoreKeys, file=file) == {"restored": 1}


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        (RevokeKey, {}, "--id is missing"),
        (ShowAccount, {}, "give the --id"),
        (RevokeKey, {"id": "0" * 16}, "there is no account"),
        (CreateKey, {"name": "A B"}, "--name"),
        (CreateKey, {"priority": "highest"}, "--priority"),
        (LimitAccount, {"organisation": "default", "weight": 5}, "--weight: weight must be set for a project"),
    ],
)
def test_faults_are_named(command: type[KeyRedis], settings: dict[str, Any], message: str, redis_url: str) -> None:
    act(CreateKey, redis_url)
    with pytest.raises(CommandError, match=message):
        act(command, redis_url, **settings)


def test_a_redis_that_does_not_answer_is_named() -> None:
    with pytest.raises(CommandError, match="--redis-url"):
        act(ListKeys, "redis://127.0.0.1:1/0")


async def test_a_key_works_after_its_backup_is_restored_and_its_budget_goes_on(
    start_gateway: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = await start_gateway()
    store, url = gateway.gateway.process.keys.ring.store, gateway.settings.redis_url
    _, secret = await store.create("acme", "web", "ci", AccountLimits(tokens_per_day=40))
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 10}
    async with gateway.worker(emit(tokens("abc"))):
        first = await gateway.post("/v1/completions", body, Authorization=f"Bearer {secret}")
    assert first.status == 200
    # A request that waits has reserved a part of the budget; the backup does not contain it.
    waiting = asyncio.create_task(gateway.post("/v1/completions", body, Authorization=f"Bearer {secret}"))
    await until(lambda: has_open_request(store))
    file = tmp_path / "keys.json"
    await asyncio.to_thread(act, BackUpKeys, url, file=str(file))
    waiting.cancel()
    assert secret[26:] not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandError, match="give the name of a new file"):
        await asyncio.to_thread(act, BackUpKeys, url, file=str(file))

    await store.client.flushall()
    await asyncio.to_thread(act, RestoreKeys, url, file=str(file))
    assert "restored: API keys: 1" in capsys.readouterr().err
    async with gateway.worker(emit(tokens("abc"))):
        assert (await gateway.post("/v1/completions", body, Authorization=f"Bearer {secret}")).status == 200
        refused = await gateway.post("/v1/completions", {**body, "max_tokens": 37}, Authorization=f"Bearer {secret}")
    assert (refused.status, refused.error["code"]) == (402, "insufficient_quota")


async def has_open_request(store: AccountStore) -> bool:
    return await store.client.hget(store.keys.spent("project:acme/web"), "open") == b"1"


# --- The settings of `quire keys` -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("create", "--grace-s", "5"), "quire-keys create: unknown flag --grace-s: `quire-keys create --help` lists"),
        (("list", "--project", "web"), "quire-keys list: unknown flag --project"),
        (("--project", "web"), "quire-keys list: unknown flag --project"),
        (("revoke", "a", "b"), "quire-keys revoke: unexpected argument 'b'"),
        (("revoke", "a", "--id", "b"), "quire-keys revoke: --id: given twice, as 'a' and with --id; give it once"),
        (("rotate", "--grace-s", "-1"), "quire-keys rotate: --grace-s: '-1' from --grace-s is too small; give a whole"),
        (("list", "--json=1"), "quire-keys list: --json: --json takes no value; give --json or --no-json"),
        (("revok",), "quire-keys: there is no command 'revok': did you mean `quire-keys revoke`?"),
        (("remove",), "quire-keys: there is no command 'remove': "),
    ],
)
def test_each_command_has_only_its_own_flags(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("quire-keys", KEYS, arguments, {}) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(message)
    assert printed.count("\n") == 1


def test_only_the_redis_of_the_keys_can_be_set_in_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    found = {item.variable for command in KEYS.commands.values() for item in options(command.settings)}
    assert found == {"", "QUIRE_REDIS_URL"}
    assert run_command("quire-keys", KEYS, ("revoke",), {"QUIRE_KEYS_ID": "a"}) == 2
    assert "QUIRE_KEYS_ID in the environment is not a setting" in capsys.readouterr().err


# --- The dead-letter queue: list, show and drop over several lanes ----------------------------------------------------


FIELDS = {"id": "r", "class": "standard", "worker": "w", "emitted": "3", "body": "x", "metadata": ""}


@pytest.fixture
def lanes(redis_url: str) -> str:
    """Two lanes with an entry of the same id, and one more in the second."""
    with Redis.from_url(redis_url) as client:
        for lane in ("one", "two/b"):
            client.xadd(LaneKeys(lane).dead, dict(FIELDS), id="5-0")
        client.xadd(LaneKeys("two/b").dead, dict(FIELDS), id="6-0")
    return redis_url


def settings(redis_url: str, action: str, entry: str = "", lane: str = "") -> DeadLetterSettings:
    return DeadLetterSettings(action=action, entry=entry, redis_url=redis_url, served_model_name=lane)


def test_all_lanes_are_listed_unless_one_is_named(lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dead_letters.run(settings(lanes, "list"), {}) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["5-0", "one"],
        ["6-0", "two/b"],
        ["5-0", "two/b"],
    ]
    assert dead_letters.run(settings(lanes, "list", lane="one"), {}) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_actions_on_dead_letters_print_json(lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    def said(action: str, entry: str = "") -> Any:
        assert dead_letters.run(replace(settings(lanes, action, entry), json=True), {}) == 0
        return json.loads(capsys.readouterr().out)

    assert [(row["entry"], row["model"]) for row in said("list")] == [
        ("5-0", "one"),
        ("6-0", "two/b"),
        ("5-0", "two/b"),
    ]
    assert said("show", "6-0")["model"] == "two/b"
    assert said("drop", "6-0") == {"dropped": "6-0"}
    body = GenerationRequest("old", "one", (1, 2), SamplingParams(max_tokens=3)).encode()
    with Redis.from_url(lanes) as client:
        client.xadd(LaneKeys("one").dead, {**FIELDS, "body": body}, id="7-0")
        assert client.exists(LaneKeys("one").request(said("retry", "7-0")["request"]))


def test_none_is_said_to_be_there(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dead_letters.run(settings(redis_url, "list"), {}) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no request was given up\n")
    assert dead_letters.run(settings(redis_url, "list", lane="one"), {}) == 0
    assert capsys.readouterr().err == "no request of model 'one' was given up\n"


def test_an_entry_of_several_lanes_is_not_guessed(lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match="one, two/b: choose with --served-model-name"):
        dead_letters.run(settings(lanes, "drop", "5-0"), {})
    assert dead_letters.run(settings(lanes, "drop", "5-0", lane="two/b"), {}) == 0
    assert dead_letters.run(settings(lanes, "drop", "5-0"), {}) == 0
    assert dead_letters.run(settings(lanes, "show", "6-0"), {}) == 0
    assert '"model": "two/b"' in capsys.readouterr().out
    with pytest.raises(CommandError, match="there is no entry '5-0'"):
        dead_letters.run(settings(lanes, "drop", "5-0"), {})


def test_a_retry_is_a_new_request_in_the_queue(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    body = GenerationRequest("old", "one", (1, 2), SamplingParams(max_tokens=3)).encode()
    with Redis.from_url(redis_url) as client:
        of_tenant = {"tenant": "standard 250 acme/web", "user": "2 ab"}
        client.xadd(LaneKeys("one").dead, {**FIELDS, **of_tenant, "body": body}, id="5-0")
        assert dead_letters.run(settings(redis_url, "retry", "5-0"), {}) == 0
        assert "queued again as request " in capsys.readouterr().out
        assert client.xlen(LaneKeys("one").dead) == 0
        assert client.xlen(LaneKeys("one").queue("standard")) == 1
        [request] = client.scan_iter(LaneKeys("one").request("*"))
        assert client.hmget(request, "tenant", "user") == [b"standard 250 acme/web", b"2 ab"]


def test_an_unreadable_request_cannot_be_retried_but_is_shown(lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match="entry 6-0 cannot be read"):
        dead_letters.run(settings(lanes, "retry", "6-0"), {})
    assert dead_letters.run(settings(lanes, "show", "6-0"), {}) == 0
    assert '"unreadable"' in capsys.readouterr().out


def test_an_action_on_one_needs_its_entry(lanes: str) -> None:
    with pytest.raises(CommandError, match="--entry is missing: give one that the action `list` shows"):
        dead_letters.run(settings(lanes, "show"), {})


# --- The command about parked requests: list, park and unpark over several lanes --------------------------------------


BOUNDS = QueueBounds(100, 10_000)


def body(pooling: str = "") -> bytes:
    return GenerationRequest("r", "one", (1, 2), SamplingParams(max_tokens=3), pooling=pooling).encode()


def at(redis_url: str, lane: str, work: Callable[[Broker], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine with a broker of a lane."""

    async def with_broker() -> Any:
        client = command_client(redis_url, lane)
        try:
            return await work(Broker(client, lane))
        finally:
            await client.aclose()

    return asyncio.run(with_broker())


async def submit(broker: Broker, name: str, pooling: str = "") -> None:
    await broker.submit(name, body(pooling), Admission(gateway="g", cost=3, bounds=BOUNDS))


@pytest.fixture
def parked_lanes(redis_url: str) -> str:
    """Lane `one` with a running and a waiting request and an embedding; `two/b` with a waiting request."""

    async def one(broker: Broker) -> None:
        await broker.create_groups()
        await submit(broker, "running")
        [delivery] = await QueueReader(broker.client, "one", "w").read(1, 0)
        assert await broker.claim(delivery, "w", new_id()) is not None
        await submit(broker, "waiting")
        await submit(broker, "vector", "mean")

    at(redis_url, "one", one)
    at(redis_url, "two/b", lambda broker: submit(broker, "other"))
    return redis_url


def parked(redis_url: str, lane: str) -> set[str]:
    with Redis.from_url(redis_url) as client:
        return {name.decode() for name in client.zrange(LaneKeys(lane).parked, 0, -1)}


def test_all_requests_are_parked_but_embeddings(parked_lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parked_requests.run(ParkingSettings(action="park", redis_url=parked_lanes), {}) == 0
    assert capsys.readouterr().out == "3 requests are parked\n"
    assert (parked(parked_lanes, "one"), parked(parked_lanes, "two/b")) == (
        {"running", "waiting"},
        {"other"},
    )
    assert parked_requests.run(ParkingSettings(redis_url=parked_lanes), {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:4] for line in lines] == [["one", "standard", "0"]] * 2 + [["two/b", "standard", "0"]]
    assert parked_requests.run(ParkingSettings(action="unpark", redis_url=parked_lanes), {}) == 0
    assert capsys.readouterr().out == "3 requests are queued again\n"
    assert parked(parked_lanes, "one") == parked(parked_lanes, "two/b") == set()


def test_actions_on_parked_requests_print_json(parked_lanes: str, capsys: pytest.CaptureFixture[str]) -> None:
    def said(action: str) -> Any:
        assert parked_requests.run(ParkingSettings(action=action, redis_url=parked_lanes, json=True), {}) == 0
        return json.loads(capsys.readouterr().out)

    assert said("list") == []
    assert said("park") == {"requests": 3, "action": "park"}
    assert {(row["request_id"], row["model"]) for row in said("list")} == {
        ("running", "one"),
        ("waiting", "one"),
        ("other", "two/b"),
    }
    assert said("unpark") == {"requests": 3, "action": "unpark"}


def test_the_requests_of_one_worker_or_one_model_are_parked(parked_lanes: str) -> None:
    assert parked_requests.run(ParkingSettings(action="park", worker="w", redis_url=parked_lanes), {}) == 0
    assert (parked(parked_lanes, "one"), parked(parked_lanes, "two/b")) == ({"running"}, set())
    of_lane = ParkingSettings(action="park", redis_url=parked_lanes, served_model_name="two/b")
    assert parked_requests.run(of_lane, {}) == 0
    assert (parked(parked_lanes, "one"), parked(parked_lanes, "two/b")) == (
        {"running"},
        {"other"},
    )


def test_one_request_is_parked_for_the_time_that_is_asked_for(parked_lanes: str) -> None:
    for_a_minute = ParkingSettings(action="park", id="waiting", retention_s=60, redis_url=parked_lanes)
    assert parked_requests.run(for_a_minute, {}) == 0
    assert parked(parked_lanes, "one") == {"waiting"}
    [one] = at(parked_lanes, "one", lambda broker: broker.read_parked(5))
    assert 50 < one.left_s <= 60
    assert parked_requests.run(ParkingSettings(action="unpark", id="waiting", redis_url=parked_lanes), {}) == 0
    for action, what in (("park", "parked"), ("unpark", "queued again")):
        with pytest.raises(CommandError, match=f"'unknown' cannot be {what}"):
            parked_requests.run(ParkingSettings(action=action, id="unknown", redis_url=parked_lanes), {})


def test_all_requests_of_a_call_are_parked(redis_url: str) -> None:
    for name in ("call", "call-1", "call-2", "calls"):
        at(redis_url, "one", lambda broker, name=name: submit(broker, name))  # type: ignore[misc]
    assert parked_requests.run(ParkingSettings(action="park", id="call", redis_url=redis_url), {}) == 0
    assert parked(redis_url, "one") == {"call", "call-1", "call-2"}


def test_a_worker_is_named_only_to_park(redis_url: str) -> None:
    with pytest.raises(CommandError, match="--worker belongs to the action `park`"):
        parked_requests.run(ParkingSettings(action="unpark", worker="w", redis_url=redis_url), {})

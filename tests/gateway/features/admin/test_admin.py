"""The admin API: keys, usage, and its own key."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.gateway.errors.api_errors import AdminKeyWrong
from quire.gateway.features.admin.admin_key import check_admin_key, read_admin_key
from quire.gateway.features.admin.admin_routes import routes
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway
from quire.gateway.settings import GatewaySettings
from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.accounts.limits import AccountLimits
from quire.shared.process.errors import StartError
from quire.shared.protocol.messages import decode_items
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, Reply, RunningGateway, raw_request, tokens

# --- The key of the admin API comes from a setting or a file, and weak or unreadable ones are refused -----------------


KEY = "0123456789abcdef"


def test_a_key_comes_from_the_setting_or_the_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    assert read_admin_key("", "") == ""
    assert read_admin_key(KEY, "") == KEY
    assert read_admin_key("", str(tmp_path / "key")) == KEY


@pytest.mark.parametrize("key", [KEY[:-1], "a b" * 10, "ä" * 20, "x" * 1025])
def test_a_weak_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(StartError, match="--admin-key: the key must have 16 to 1024 ASCII") as caught:
        read_admin_key(key, "")
    assert key not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--admin-key-file .*none cannot be read"):
        read_admin_key("", str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    with pytest.raises(StartError, match="empty: the key must have"):
        read_admin_key("", str(tmp_path / "empty"))
    with pytest.raises(StartError, match="both given"):
        read_admin_key(KEY, "x")


def request(header: str) -> Any:
    return SimpleNamespace(headers={"Authorization": header} if header else {})


def test_only_the_bearer_token_opens() -> None:
    check_admin_key(request(f"Bearer {KEY}"), KEY)
    check_admin_key(request(f"bearer {KEY}"), KEY)
    for header in (
        "",
        KEY,
        f"Basic {KEY}",
        "Bearer",
        "Bearer x",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer \udcff",
    ):
        with pytest.raises(AdminKeyWrong):
            check_admin_key(request(header), KEY)


# --- Without an admin key the admin API has no routes; a weak key is refused ------------------------------------------


def paths(**settings: Any) -> list[str]:
    model: Any = type("Model", (), {"name": "m"})()
    return [route.path for route in routes(ModelDirectory.of(Gateway(GatewaySettings(**settings), model)))]


async def test_a_weak_key_is_refused(start_gateway: Start) -> None:
    with pytest.raises(StartError, match="--admin-key"):
        await start_gateway(admin_key="weak")


# --- The admin API for keys over HTTP, with a real Redis --------------------------------------------------------------


ADMIN = "0123456789abcdef-admin"


async def admin(gateway: RunningGateway, method: str, path: str, body: Any = None, key: str = ADMIN) -> Reply:
    data = json.dumps(body).encode() if body is not None else b""
    return await gateway.send(raw_request(method, path, data, {"Authorization": f"Bearer {key}"}))


async def test_a_key_from_its_creation_to_its_end(start_gateway: Start) -> None:
    gateway = await start_gateway(admin_key=ADMIN, require_keys=True)
    limits = {"requests_per_minute": 5, "cost_per_day": 0.5}
    made = await admin(gateway, "POST", "/admin/keys", {"name": "ci", "project": "web", "limits": limits})
    assert made.status == 201
    key, key_id = made.json["key"], made.json["id"]
    assert (made.json["organisation"], made.json["project"], made.json["limits"]) == ("default", "web", limits)
    models = raw_request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert (await gateway.send(models)).status == 200
    shown = await admin(gateway, "GET", f"/admin/keys/{key_id}")
    listed = await admin(gateway, "GET", "/admin/keys")
    assert [shown.json] == listed.json["data"]
    assert "key" not in shown.json
    for path in (f"keys/{key_id}", "projects/default/web", "organisations/default"):
        changed = await admin(gateway, "PUT", f"/admin/{path}/limits", {"max_tokens": 9})
        assert changed.json["limits"] == {"max_tokens": 9}
    assert len((await admin(gateway, "GET", "/admin/accounts")).json["data"]) == 3
    rotated = (await admin(gateway, "POST", f"/admin/keys/{key_id}/rotate")).json["key"]
    assert rotated != key
    assert (await gateway.send(models)).status == 401
    assert (await admin(gateway, "DELETE", f"/admin/keys/{key_id}")).json["revoked"]
    again = raw_request("GET", "/v1/models", headers={"x-api-key": rotated})
    assert (await gateway.send(again)).status == 401
    audit = await admin(gateway, "GET", "/admin/audit")
    assert [entry["action"] for entry in audit.json["data"]] == [
        "revoke",
        "rotate",
        "limit",
        "limit",
        "limit",
        "create",
    ]
    assert all(secret[26:] not in audit.body.decode() for secret in (key, rotated))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"unknown": 1}, "unknown"),
        ({"name": "A B"}, "name"),
        ({"project": 5}, "project"),
        ({"expires_in_s": -1}, "expires_in_s"),
        ({"limits": []}, "limits"),
        ({"limits": {"max_tokens": "many"}}, "max_tokens"),
        ({"limits": {"weight": 100}}, "weight"),
    ],
)
async def test_wrong_values_are_refused_by_name(body: Any, param: str, start_gateway: Start) -> None:
    gateway = await start_gateway(admin_key=ADMIN)
    reply = await admin(gateway, "POST", "/admin/keys", body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert (await admin(gateway, "DELETE", "/admin/keys/" + "0" * 16)).status == 404
    assert (await admin(gateway, "GET", "/admin/keys")).json["data"] == []


# --- Usage over HTTP equals what the requests used, recounted from the logs and outcomes in Redis ---------------------


async def get(gateway: RunningGateway, path: str, key: str) -> Reply:
    return await gateway.send(raw_request("GET", path, headers={"Authorization": f"Bearer {key}"}))


async def recount(gateway: RunningGateway) -> dict[str, tuple[int, int, int]]:
    """Count requests, prompt tokens and generated tokens of each key from the hashes and the output logs."""
    broker = gateway.gateway.broker
    client: Any = broker.client
    found: dict[str, tuple[int, int, int]] = {}
    async for name in client.scan_iter(broker.keys.request("*")):
        packed_metadata, account, outcome = await client.hmget(name, "metadata", "account", "outcome")
        request_id = name.decode().rsplit(":", 1)[1]
        logged = await client.xrange(broker.keys.output(request_id))
        emitted = max((item.end for _, data in logged for item in decode_items(data[b"item"])), default=0)
        has_computed = emitted or outcome in (b"stop", b"length")
        before = found.get((account or b"").decode(), (0, 0, 0))
        metadata = CallMetadata.decode(packed_metadata)
        prompt = metadata.prompt_tokens // metadata.requests if has_computed else 0
        found[(account or b"").decode()] = (before[0] + 1, before[1] + prompt, before[2] + emitted)
    return found


async def test_the_usage_is_the_sum_of_the_outcomes(start_gateway: Start) -> None:
    gateway = await start_gateway(admin_key=ADMIN)
    store = gateway.gateway.process.keys.ring.store
    keys = [(await store.create("acme", "web", f"k{n}", AccountLimits())) for n in range(2)]
    async with gateway.worker(emit(tokens("abcdef"))):
        for turn in range(5):
            account, secret = keys[turn % 2]
            body = {
                "model": MODEL,
                "prompt": ["Hello"] * (1 + turn % 2),
                "max_tokens": 20,
                "n": 1 + turn % 3,
            }
            assert (await gateway.post("/v1/completions", body, Authorization=f"Bearer {secret}")).status == 200
        await gateway.complete(max_tokens=3)  # without a key
    expected = await recount(gateway)
    rows = (await get(gateway, "/admin/usage", ADMIN)).json["data"]
    assert len(rows) == 2
    for row in rows:
        assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == expected[row["key"]]
        assert row["model"] == MODEL
    for account, secret in keys:
        own = (await get(gateway, "/v1/usage?days=1", secret)).json["data"]
        assert own == [row for row in rows if row["key"] == account.id]
    table = (await get(gateway, "/admin/usage?format=csv", ADMIN)).body.decode()
    assert [row["key"] for row in csv.DictReader(io.StringIO(table))] == [row["key"] for row in rows]


@pytest.mark.parametrize("query", ["days=0", "days=401", "days=x", "format=xml", "key=other", "days=1&days=2"])
async def test_wrong_queries_are_refused(query: str, start_gateway: Start) -> None:
    gateway = await start_gateway(admin_key=ADMIN)
    assert (await get(gateway, f"/admin/usage?{query}", ADMIN)).status == 400

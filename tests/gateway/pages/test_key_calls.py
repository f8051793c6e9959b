"""The admin API for keys over HTTP, with a real Redis."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.support.gateway.running import Reply, RunningGateway, raw_request

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


PATHS = [
    ("GET", "/admin/keys"),
    ("POST", "/admin/keys"),
    ("GET", "/admin/accounts"),
    ("GET", "/admin/audit"),
    ("GET", "/admin/usage"),
    ("GET", "/admin/keys/0123456789abcdef"),
    ("DELETE", "/admin/keys/0123456789abcdef"),
    ("POST", "/admin/keys/0123456789abcdef/rotate"),
    ("PUT", "/admin/keys/0123456789abcdef/limits"),
    ("PUT", "/admin/projects/a/b/limits"),
    ("PUT", "/admin/organisations/a/limits"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_every_path_needs_the_admin_key_and_is_off_without_one(
    method: str, path: str, start_gateway: Start
) -> None:
    gateway = await start_gateway(admin_key=ADMIN)
    key = (await admin(gateway, "POST", "/admin/keys")).json["key"]
    for wrong in ("", "x" * 20, key):
        reply = await admin(gateway, method, path, key=wrong)
        assert (reply.status, reply.error["code"]) == (401, "invalid_admin_key")
    assert (await admin(await start_gateway(), method, path)).status == 404


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

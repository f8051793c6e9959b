"""The access matrix: the callers that may use each route. No caller reaches what another one made.

A route without an entry in ACCESS fails the test, and so does an entry without a route.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import pytest

from quire.gateway.features.pages import static_files
from quire.gateway.model.served_model import load_model
from quire.gateway.server.app import create_app
from quire.gateway.serving.service import Gateway
from quire.gateway.settings import GatewaySettings
from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol.states import RequestState
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, Reply, RunningGateway, chat_body, raw_request, tokens, until

ADMIN = "0123456789abcdef-admin"
NOT_THERE = "0" * 32


class Access(Enum):
    """The callers that may use a route."""

    #: Everyone, also without a key: probes, documents and files.
    PUBLIC = auto()
    #: Every caller; the route names nothing that a caller has made.
    CALLER = auto()
    #: Every caller; the answer has only data of the caller's key.
    OWN = auto()
    #: The maker of the call that the path names; for any other caller it does not exist.
    MAKER = auto()
    #: The key that made the file or the batch; `batches/test_batch_routes.py` tries the others.
    FILES = auto()
    #: The key that made the conversation.
    CONVERSATION = auto()
    #: Operators, by the admin key; API keys do not count.
    OPERATOR = auto()


CHAT, TEXT, MESSAGE, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
CONVERSATION = "/v1/conversations"
# Routes of a conversation, each with its body; those that delete come last.
OF_CONVERSATIONS: dict[str, Any] = {
    f"GET {CONVERSATION}/{{id}}": None,
    f"POST {CONVERSATION}/{{id}}": {"metadata": {"a": "b"}},
    f"GET {CONVERSATION}/{{id}}/items": None,
    f"POST {CONVERSATION}/{{id}}/items": {"items": [{"role": "user", "content": "x"}]},
    f"GET {CONVERSATION}/{{id}}/items/{{item_id}}": None,
    f"DELETE {CONVERSATION}/{{id}}/items/{{item_id}}": None,
    f"DELETE {CONVERSATION}/{{id}}": None,
}

# Scores of pairs: the body of a call by its paths.
RANKED: dict[str, Any] = {"model": MODEL, "query": "a", "documents": ["b"]}
SCORED: dict[str, Any] = {"model": MODEL, "queries": "a", "documents": ["b"]}
SCORES = dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RANKED) | dict.fromkeys(("/score", "/v1/score"), SCORED)

ACCESS: dict[str, Access] = {
    **{f"POST {path}": Access.CALLER for path in (CHAT, TEXT, MESSAGE, RESPONSE, "/v1/embeddings", *SCORES)},
    **{f"POST {path}": Access.CALLER for path in (f"{MESSAGE}/count_tokens", f"{RESPONSE}/input_tokens")},
    **{f"POST {path}": Access.CALLER for path in (f"{RESPONSE}/compact", CONVERSATION)},
    f"GET {RESPONSE}": Access.CALLER,
    **dict.fromkeys(OF_CONVERSATIONS, Access.CONVERSATION),
    **{f"POST {path}": Access.CALLER for path in ("/tokenize", "/detokenize")},
    **{f"GET {path}": Access.CALLER for path in ("/v1/models", "/v1/models/{name}", "/status", "/tokenizer_info")},
    **{f"GET {path}": Access.CALLER for path in ("/engine/workers", "/engine/stream")},
    "GET /v1/usage": Access.OWN,
    **{f"GET {path}/{{id}}/stream": Access.MAKER for path in (CHAT, TEXT, MESSAGE)},
    **{
        f"POST {path}/{{id}}/{verb}": Access.MAKER
        for path in (CHAT, TEXT, MESSAGE, RESPONSE)
        for verb in ("cancel", "park", "unpark")
    },
    **{f"POST {path}/{{id}}/fork": Access.MAKER for path in (CHAT, TEXT, RESPONSE)},
    f"GET {RESPONSE}/{{id}}": Access.MAKER,
    f"GET {RESPONSE}/{{id}}/input_items": Access.MAKER,
    f"DELETE {RESPONSE}/{{id}}": Access.MAKER,
    **{f"{method} /v1/{name}": Access.OWN for name in ("files", "batches") for method in ("GET", "POST")},
    **{f"GET /v1/files/{{id}}{rest}": Access.FILES for rest in ("", "/content")},
    "DELETE /v1/files/{id}": Access.FILES,
    "GET /v1/batches/{id}": Access.FILES,
    "POST /v1/batches/{id}/cancel": Access.FILES,
    **{f"GET /admin/{name}": Access.OPERATOR for name in ("accounts", "audit", "usage", "keys", "adapters")},
    **{f"POST /admin/{name}": Access.OPERATOR for name in ("keys", "adapters")},
    "GET /admin/keys/{id}": Access.OPERATOR,
    "DELETE /admin/keys/{id}": Access.OPERATOR,
    "POST /admin/keys/{id}/rotate": Access.OPERATOR,
    "PUT /admin/keys/{id}/limits": Access.OPERATOR,
    "PUT /admin/projects/{id}/limits": Access.OPERATOR,
    "PUT /admin/organisations/{id}/limits": Access.OPERATOR,
    "DELETE /admin/adapters/{name}": Access.OPERATOR,
    **{f"GET /{name}": Access.PUBLIC for name in ("", "engine", "docs", "version", "openapi.json")},
    **{f"GET /{name}": Access.PUBLIC for name in ("healthz", "health", "ping", "readyz")},
}
MAKERS = sorted(route for route, access in ACCESS.items() if access is Access.MAKER)
OPERATORS = sorted(route for route, access in ACCESS.items() if access is Access.OPERATOR)

# By path: the prefix of the ids of its calls, and the body of a new call that runs without a client.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT: ("chatcmpl-", {**chat_body(), "stream": True, "background": True}),
    TEXT: ("cmpl-", {"model": MODEL, "prompt": "Hello", "stream": True, "background": True}),
    MESSAGE: ("msg_", {**chat_body(), "max_tokens": 20, "stream": True}),
    RESPONSE: ("resp_", {"model": MODEL, "input": "Hello", "background": True, "stream": True}),
}


def path_of(route: str) -> str:
    """Return the path of new calls below which a route is."""
    return next(path for path in CALLS if route.split(" ")[1].startswith(f"{path}/"))


@dataclass(frozen=True)
class People:
    """The maker of the calls, and everyone who must not reach them."""

    maker: str
    others: Mapping[str, str]
    revoked: str


async def key_of(gateway: RunningGateway, project: str, name: str) -> str:
    store = gateway.gateway.process.keys.ring.store
    return (await store.create("acme" if project == "web" else "other", project, name, AccountLimits()))[1]


async def people_of(gateway: RunningGateway) -> People:
    maker, colleague, stranger, revoked = [
        await key_of(gateway, project, name)
        for project, name in (("web", "maker"), ("web", "colleague"), ("shop", "stranger"), ("web", "revoked"))
    ]
    await gateway.gateway.process.keys.ring.store.revoke(revoked[9:25])
    gateway.gateway.process.keys.ring.forget()
    return People(
        maker, {"of its project": colleague, "of another organisation": stranger, "without a key": ""}, revoked
    )


async def send(gateway: RunningGateway, route: str, key: str = "", body: Any = None, **headers: str) -> Reply:
    """Send a request, and return the answer; of an event stream, its head and what there is at once."""
    method, path = route.split(" ")
    data = json.dumps(body).encode() if body is not None else b""
    return await gateway.send(
        raw_request(method, path, data, {**({"Authorization": f"Bearer {key}"} if key else {}), **headers})
    )


@asynccontextmanager
async def calls_of(gateway: RunningGateway, key: str) -> AsyncIterator[dict[str, str]]:
    """Make a call on each path with a key; yield the ids of their requests. The streams stay open."""
    async with AsyncExitStack() as stack:
        ids = {}
        for path, (_, body) in CALLS.items():
            stream = await stack.enter_async_context(gateway.stream(path, body, Authorization=f"Bearer {key}"))
            assert stream.response.status == 200, await stream.response.text()
            ids[path] = stream.response.headers["X-Quire-Request-Id"]
        yield ids


def named(route: str, ids: Mapping[str, str]) -> str:
    """Return the route with the id of the call on its path."""
    path = path_of(route)
    return route.replace("{id}", CALLS[path][0] + ids[path])


async def state_of(gateway: RunningGateway, request_id: str) -> tuple[Any, ...]:
    """Return what a caller could change of a request."""
    broker = gateway.gateway.broker
    return tuple(
        await broker.client.hmget(broker.keys.request(request_id), "state", "cancel", "outcome", "metadata", "gateways")
    )


def test_every_route_has_an_entry_and_every_entry_a_route(model_folder: Any) -> None:
    settings = GatewaySettings(model=str(model_folder), admin_key=ADMIN, engine_view="on")
    app = create_app(Gateway(settings, load_model(settings.model, settings.name)))
    files = {static_files.path_of(name) for name in static_files.names() if not name.endswith(".html")}
    routes = {
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.method != "HEAD" and route.resource and route.resource.canonical not in files
    }
    assert routes == ACCESS.keys()
    # A route below /v1/ with an id belongs to the maker of the call, the conversation, the file or the batch.
    named_ids = {route for route in routes if "{id}" in route and " /v1/" in route}
    makers = (Access.MAKER, Access.CONVERSATION, Access.FILES)
    assert named_ids == {route for route, access in ACCESS.items() if access in makers}
    assert {route for route in routes if " /admin/" in route} == set(OPERATORS)


async def bring_into(state: RequestState, gateway: RunningGateway, ids: Mapping[str, str], key: str) -> None:
    if state is RequestState.PARKED:
        for path, (prefix, _) in CALLS.items():
            assert (await send(gateway, f"POST {path}/{prefix}{ids[path]}/park", key)).json["parked"] is True
    elif state is RequestState.DONE:

        async def has_ended() -> bool:
            return all([(await state_of(gateway, id_))[0] == b"done" for id_ in ids.values()])

        async with gateway.worker(emit(tokens("abc"))):
            await until(has_ended)


@pytest.mark.parametrize("state", [RequestState.QUEUED, RequestState.PARKED, RequestState.DONE])
async def test_only_its_maker_reaches_a_call(state: RequestState, start_gateway: Start) -> None:
    """Every route that names a call, for every other caller, in every state in which a call can stay."""
    gateway = await start_gateway()
    strict = await start_gateway(require_keys=True)
    people = await people_of(gateway)
    async with calls_of(gateway, people.maker) as ids:
        await bring_into(state, gateway, ids, people.maker)
        before = {id_: await state_of(gateway, id_) for id_ in ids.values()}
        assert {found[0] for found in before.values()} == {state.encode()}
        unknown = dict.fromkeys(ids, NOT_THERE)
        for route in MAKERS:
            for who, key in people.others.items():
                reply = await send(gateway, named(route, ids), key)
                of_unknown = await send(gateway, named(route, unknown), key)
                assert reply.status == of_unknown.status == 404, (route, who)
                shown = [
                    one.body.decode().replace(id_, "").replace(one.headers["x-request-id"], "")
                    for one, id_ in ((reply, ids[path_of(route)]), (of_unknown, NOT_THERE))
                ]
                assert shown[0] == shown[1], (route, who)
            for one in (gateway, strict):
                assert (await send(one, named(route, ids), people.revoked)).status == 401, route
            assert (await send(strict, named(route, ids))).status == 401, route
        assert {id_: await state_of(gateway, id_) for id_ in ids.values()} == before
        # The maker reaches all of them: the routes that end or delete a call come last.
        order = sorted(MAKERS, key=lambda route: (route.startswith("DELETE"), "cancel" in route, "unpark" in route))
        for route in order:
            if route.endswith(("/stream", "/fork")):
                continue  # would wait for the end of a call that waits
            assert (await send(gateway, named(route, ids), people.maker)).status == 200, route


async def test_a_revoked_key_does_not_reach_its_own_calls(start_gateway: Start) -> None:
    gateway = await start_gateway()
    people = await people_of(gateway)
    async with calls_of(gateway, people.maker) as ids:
        await gateway.gateway.process.keys.ring.store.revoke(people.maker[9:25])
        gateway.gateway.process.keys.ring.forget()
        before = {id_: await state_of(gateway, id_) for id_ in ids.values()}
        for route in MAKERS:
            assert (await send(gateway, named(route, ids), people.maker)).status == 401, route
        assert {id_: await state_of(gateway, id_) for id_ in ids.values()} == before


async def test_only_its_maker_continues_a_response(start_gateway: Start) -> None:
    gateway = await start_gateway()
    people = await people_of(gateway)
    async with gateway.worker(emit(tokens("abc"))):
        made = await send(gateway, f"POST {RESPONSE}", people.maker, {"model": MODEL, "input": "Hello"})
        for previous in (made.json["id"], f"resp_{NOT_THERE}"):
            body = {"model": MODEL, "input": "x", "previous_response_id": previous}
            for who, key in people.others.items():
                reply = await send(gateway, f"POST {RESPONSE}", key, body)
                assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found"), who
            assert (await send(gateway, f"POST {RESPONSE}", people.revoked, body)).status == 401
        body = {"model": MODEL, "input": "x", "previous_response_id": made.json["id"]}
        assert (await send(gateway, f"POST {RESPONSE}", people.maker, body)).status == 200


async def test_only_its_maker_reaches_a_conversation(start_gateway: Start) -> None:
    gateway = await start_gateway()
    people = await people_of(gateway)
    items = [{"role": "user", "content": "Hello"}]
    made = (await send(gateway, f"POST {CONVERSATION}", people.maker, {"items": items})).json["id"]
    [item] = (await send(gateway, f"GET {CONVERSATION}/{made}/items", people.maker)).json["data"]
    answer = {"model": MODEL, "input": "x", "conversation": made}
    for route, body in {f"POST {RESPONSE}": answer, **OF_CONVERSATIONS}.items():
        path = route.replace("{id}", made).replace("{item_id}", item["id"])
        other = route.replace("{id}", f"conv_{NOT_THERE}").replace("{item_id}", item["id"])
        for who, key in people.others.items():
            reply = await send(gateway, path, key, body)
            assert (reply.status, reply.error["code"]) == (404, "not_found"), (route, who)
            unknown = (await send(gateway, other, key, body)).json["error"]["message"]
            assert route == f"POST {RESPONSE}" or reply.error["message"].replace(made[5:], NOT_THERE) == unknown
        assert (await send(gateway, path, people.revoked, body)).status == 401
    assert (await send(gateway, f"GET {CONVERSATION}/{made}/items", people.maker)).json["data"] == [item]
    for route, body in OF_CONVERSATIONS.items():
        path = route.replace("{id}", made).replace("{item_id}", item["id"])
        assert (await send(gateway, path, people.maker, body)).status == 200, route


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGE, RESPONSE])
async def test_an_idempotency_key_names_the_calls_of_one_caller(path: str, start_gateway: Start) -> None:
    """For others it is unused: they get calls of their own, and no conflict with another body."""
    gateway = await start_gateway()
    people = await people_of(gateway)
    body = {name: value for name, value in CALLS[path][1].items() if name not in ("stream", "background")}
    callers = [people.maker, *people.others.values()]
    async with gateway.worker(emit(tokens("abc"))):
        ids = []
        for index, key in enumerate(callers):
            reply = await send(gateway, f"POST {path}", key, {**body, "temperature": index / 10}, Idempotency_Key="k")
            assert reply.status == 200, reply.body
            ids.append(reply.headers["x-quire-request-id"])
    assert len(set(ids)) == len(callers)
    assert await gateway.accepted() == len(callers)


async def test_usage_shows_a_key_its_own(start_gateway: Start) -> None:
    gateway = await start_gateway(admin_key=ADMIN)
    people = await people_of(gateway)
    async with gateway.worker(emit(tokens("abc"))):
        await send(gateway, f"POST {CHAT}", people.maker, chat_body())
    [row] = (await send(gateway, "GET /v1/usage", people.maker)).json["data"]
    assert row["requests"] == 1
    for key in list(people.others.values())[:2]:
        assert (await send(gateway, "GET /v1/usage", key)).json["data"] == []
    assert (await send(gateway, "GET /v1/usage")).status == 401
    assert (await send(gateway, "GET /v1/usage", people.revoked)).status == 401


@pytest.mark.parametrize("route", OPERATORS)
async def test_the_admin_api_takes_its_own_key_only(route: str, start_gateway: Start) -> None:
    gateway, off = await start_gateway(admin_key=ADMIN), await start_gateway()
    people = await people_of(gateway)
    place = {"keys": people.maker[9:25], "projects": "acme/web", "organisations": "acme", "adapters": "x"}
    path = route.replace("{id}", place.get(route.split("/")[2], "")).replace("{name}", "x")
    accounts = await gateway.gateway.broker.client.hgetall("quire:{accounts}:accounts")
    for key in (people.maker, *people.others.values(), people.revoked, ADMIN[:-1]):
        reply = await send(gateway, path, key, {} if route.startswith(("POST", "PUT")) else None)
        assert (reply.status, reply.error["code"]) == (401, "invalid_admin_key")
        assert (await send(off, path, key)).status in (401, 404)
    assert (await send(off, path, ADMIN)).status in (401, 404)
    assert await gateway.gateway.broker.client.hgetall("quire:{accounts}:accounts") == accounts


# Calls that name a model: the body of each route that every caller may POST to.
NAMING: dict[str, dict[str, Any]] = {
    **{path: body | {"background": None} for path, (_, body) in CALLS.items()},
    "/v1/embeddings": {"model": MODEL, "input": "Hello"},
    **SCORES,
    f"{MESSAGE}/count_tokens": chat_body(),
    f"{RESPONSE}/input_tokens": {"model": MODEL, "input": "Hello"},
    f"{RESPONSE}/compact": {"model": MODEL, "input": "Hello"},
    CONVERSATION: {},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize(
    "path", [route.split()[1] for route in ACCESS if route.startswith("POST") and ACCESS[route] is Access.CALLER]
)
async def test_a_key_of_another_model_finds_none(start_gateway: Start, path: str) -> None:
    gateway = await start_gateway()
    store = gateway.gateway.process.keys.ring.store
    _, secret = await store.create("acme", "web", "other", AccountLimits(models=("other",)))
    reply = await gateway.post(path, NAMING[path], Authorization=f"Bearer {secret}")
    assert reply.status == 404, reply.body
    assert "your API key has no access to it" in reply.json["error"]["message"]

"""Labels of a call: users are hashed, metadata and tier come back, and a header names parameters without effect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.gateway.api.headers import NO_EFFECT_HEADER
from quire.gateway.api.labels import USER_HASH_DIGITS, read_labels, user_hash
from quire.gateway.api.parameters import CHAT, read
from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.stream.call_metadata import CallMetadata
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.refusals import CHAT as CHATS
from tests.support.gateway.refusals import COMPLETIONS, check
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, tokens

METADATA = {"team": "a", "run": "4 ⅞"}
PATHS = {CHATS: chat_body(), COMPLETIONS: {"model": MODEL, "prompt": "Hello"}}
NO_EFFECT = NO_EFFECT_HEADER.lower()


def labels(**given: Any) -> Any:
    return read_labels(read(chat_body(**given), CHAT))


@pytest.mark.parametrize(
    ("tier", "priority", "expected"),
    [
        ("auto", None, ("standard", "default")),
        ("auto", "batch", ("batch", "flex")),
        ("default", None, ("standard", "default")),
        ("flex", None, ("batch", "flex")),
        ("flex", "batch", ("batch", "flex")),
        ("priority", None, ("interactive", "priority")),
        (None, "interactive", ("interactive", "")),
        (None, None, ("standard", "")),
    ],
)
def test_a_tier_is_a_class(tier: str | None, priority: str | None, expected: tuple[str, str]) -> None:
    found = labels(service_tier=tier, priority=priority)
    assert (found.priority_class, found.service_tier) == expected


@pytest.mark.parametrize(("tier", "priority"), [("default", "batch"), ("flex", "standard"), ("priority", "standard")])
def test_a_tier_against_the_priority_is_refused(tier: str, priority: str) -> None:
    with pytest.raises(InvalidRequest, match="give one of them") as caught:
        labels(service_tier=tier, priority=priority)
    assert caught.value.param == "service_tier"


def test_the_newer_name_of_the_user_has_precedence() -> None:
    assert labels(user="a").user == "a"
    assert labels(user="a", safety_identifier="b").user == labels(safety_identifier="b").user == "b"
    assert labels(user="", safety_identifier=None).user == ""


def test_a_user_is_hashed_with_the_key() -> None:
    found = user_hash("someone@example.org", b"key")
    assert len(found) == USER_HASH_DIGITS
    assert found == user_hash("someone@example.org", b"key")
    assert len({found, user_hash("someone@example.org", b"other"), user_hash("someone", b"key")}) == 3
    assert user_hash("", b"key") == ""


def test_only_values_that_ask_for_something_are_without_effect() -> None:
    assert labels(store=False, prompt_cache_key="", prediction=None).no_effect == ()
    assert labels(store=True, prompt_cache_key="k", prompt_cache_retention="24h").no_effect == (
        "store",
        "prompt_cache_key",
        "prompt_cache_retention",
    )


WRONG: dict[str, list[Any]] = {
    "user": [5, {}, "x" * 513],
    "safety_identifier": [5, ["x"], "x" * 513],
    "metadata": ["x", [], {str(n): "" for n in range(17)}, {"": "x"}, {"k" * 65: "x"}],
    "service_tier": ["scale", "standard", "", 1],
    "store": ["true", 1],
    "prompt_cache_key": [1, "x" * 513],
    "prompt_cache_retention": ["1h", 24],
    "prompt_cache_options": ["x", []],
    "prediction": ["x", []],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", WRONG)
async def test_a_label_of_the_wrong_form_is_refused(server: RunningGateway, path: str, name: str) -> None:
    for value in WRONG[name]:
        await check(server, path, {**PATHS[path], name: value}, 400, name, name)


@pytest.mark.parametrize("value", [5, None, "x" * 513, {}])
async def test_a_value_of_metadata_is_a_short_string(server: RunningGateway, value: Any) -> None:
    await check(server, CHATS, chat_body(metadata={"run": value}), 400, "metadata.run", "a string")


@pytest.mark.parametrize("path", PATHS)
async def test_what_has_no_effect_is_named_in_a_header(gateway: RunningGateway, path: str) -> None:
    async with gateway.worker(emit(tokens("a"), "stop")):
        quiet = await gateway.post(path, {**PATHS[path], "store": False})
        assert NO_EFFECT not in quiet.headers
        reply = await gateway.post(path, {**PATHS[path], "store": True, "prompt_cache_key": "k"})
        assert (reply.status, reply.headers[NO_EFFECT]) == (200, "store, prompt_cache_key")
        async with gateway.stream(path, {**PATHS[path], "stream": True, "store": True}) as stream:
            assert stream.response.headers[NO_EFFECT] == "store"
            await stream.rest()


@pytest.mark.parametrize("path", PATHS)
async def test_labels_are_the_same_in_the_answer_in_a_stream_and_at_another_gateway(
    gateway: RunningGateway, start_gateway: Start, path: str
) -> None:
    body = {**PATHS[path], "metadata": METADATA, "service_tier": "flex", "prompt_cache_key": "k"}
    async with gateway.worker(emit(tokens("ab"), "stop")) as worker:
        whole = (await gateway.post(path, body)).json
        assert (whole["metadata"], whole["service_tier"]) == (METADATA, "flex")
        events = await gateway.events(path, {**body, "stream": True, "background": True})
        chunks = [event.data for event in events if event.data != "[DONE]"]
        assert {chunk["service_tier"] for chunk in chunks} == {"flex"}
        assert [chunk.get("metadata") for chunk in chunks] == [
            METADATA if chunk["choices"][0]["finish_reason"] else None for chunk in chunks
        ]
        other = await start_gateway()
        async with other.stream(f"{path}/{chunks[0]['id']}/stream") as resumed:
            assert await resumed.rest() == events
    assert worker is not None
    plain = chunks[0]["id"].split("-")[1]
    stored = await gateway.gateway.broker.client.hmget(gateway.gateway.broker.keys.request(plain), "metadata", "class")
    assert CallMetadata.decode(stored[0]).prompt_cache_key == "k"
    assert stored[1] == b"batch"


async def test_an_answer_without_labels_has_none(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("a"), "stop")):
        reply = await gateway.chat(metadata={}, user="someone")
    assert not {"metadata", "service_tier"} & reply.json.keys()


async def test_the_log_has_the_hash_of_the_user_and_never_the_user(
    start_gateway: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    gateway = await start_gateway(user_hash_key="the key")
    async with gateway.worker(emit(tokens("a"), "stop")):
        await gateway.chat(user="someone@example.org")
    [record] = [one for one in caplog.records if one.name == "gateway.access" and "chat" in one.getMessage()]
    expected = user_hash("someone@example.org", b"the key")
    assert record.__dict__["user_hash"] == expected
    assert f" user={expected}" in record.getMessage()
    assert "someone@example.org" not in caplog.text
    keys = [key async for key in gateway.gateway.broker.client.scan_iter()]
    for key in keys:
        if await gateway.gateway.broker.client.type(key) == b"hash":
            stored = await gateway.gateway.broker.client.hgetall(key)
            assert "someone@example.org" not in json.dumps([str(value) for value in stored.values()])


async def test_the_openai_sdk_labels_its_calls(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("an answer"), "stop")), gateway.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            user="someone",
            safety_identifier="hash of someone",
            metadata=METADATA,
            store=True,
            service_tier="priority",
            prompt_cache_key="conversation 7",
            prompt_cache_retention="24h",
            extra_headers={"X-Request-Id": "call-7"},
        )
        answer = raw.parse()
        assert (answer.service_tier, answer.choices[0].message.content) == ("priority", "an answer")
        assert answer.to_dict()["metadata"] == METADATA
        assert raw.headers[NO_EFFECT] == "store, prompt_cache_key, prompt_cache_retention"
        assert answer._request_id == "call-7"
        completion = await client.completions.create(model=MODEL, prompt="Hello", user="someone")
        assert completion.choices[0].text == "an answer"


async def test_a_repeated_call_gets_the_labels_of_the_first(gateway: RunningGateway) -> None:
    body = chat_body(metadata=METADATA, service_tier="default")
    async with gateway.worker(emit(tokens("a"), "stop")):
        first, second = [await gateway.post(CHATS, body, Idempotency_Key="labels") for _ in range(2)]
    assert first.json == second.json
    assert second.json["metadata"] == METADATA

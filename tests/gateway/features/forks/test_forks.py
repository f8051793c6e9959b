"""Forks at the gateway: what a worker gets, where a fork may begin, and how the rest of an answer is read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from quire.gateway.stream.sse import EventId
from quire.shared.protocol.messages import GenerationRequest
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Script, Steps, emit
from tests.support.gateway.running import MODEL, Reply, RunningGateway, chat_body, texts, tokens, write_model
from tests.support.tokenizers import byte_level

EOS = 2
TEXT = "Once there was a boat."
THOUGHT = "<think>one two</think>Three."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def answers(first: list[int], then: list[int], **kinds: Any) -> Script:
    """Return a script that answers the first call, and each fork of it with other tokens."""

    async def script(request: GenerationRequest) -> Steps:
        async for step in emit(then if request.forked_from else first, **kinds)(request):
            yield step

    return script


def letters(text: str) -> list[int]:
    """Return one token for each character."""
    return [token for letter in text for token in tokens(letter)]


async def fork(gateway: RunningGateway, first: Reply, path: str = "/v1/chat/completions", **params: Any) -> Reply:
    return await gateway.post(f"{path}/{first.json['id']}/fork", params)


async def test_a_worker_gets_the_first_call_with_the_kept_tokens(gateway: RunningGateway) -> None:
    async with gateway.worker(answers(tokens(TEXT), tokens("!"))) as worker:
        first = await gateway.chat(
            max_tokens=30, seed=5, temperature=0.5, min_tokens=12, stop=["x"], cache_salt="s", frequency_penalty=0.25
        )
        answer = await fork(gateway, first, at=10, temperature=0.75)
        assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "!")
        continued = await fork(gateway, first, at=10, continuation=" yes", max_tokens=3, n=2, seed=6)
        assert continued.status == 200
    original, one, other = worker.claimed
    assert one.prompt == original.prompt + tuple(tokens(TEXT)[:10])
    assert (one.forked_from, one.num_kept, one.cache_salt) == (original.id, 10, "s")
    assert one.sampling == replace(original.sampling, max_tokens=20, min_tokens=2, temperature=0.75)
    assert other.prompt == one.prompt + tuple(tokens(" yes"))
    assert (other.num_kept, other.sampling.max_tokens, other.sampling.n, other.sampling.seed) == (14, 3, 2, 6)
    assert answer.json["usage"]["prompt_tokens"] == len(one.prompt)


async def test_the_id_of_an_event_is_a_place_in_all_choices(gateway: RunningGateway) -> None:
    async with gateway.worker(answers(tokens("abcdef"), tokens("!"))) as worker:
        first = await gateway.chat(n=2, max_tokens=6)
        for place, choice, kept in (
            ("5", 0, "abc"),
            ("5", 1, "ab"),
            ("12.3", 1, "abcdef"),
            ("0.1", 0, ""),
            (4, 1, "abcd"),
        ):
            assert (await fork(gateway, first, at=place, choice=choice, max_tokens=2)).status == 200
            assert worker.claimed[-1].prompt == worker.claimed[0].prompt + tuple(tokens(kept))


async def test_no_fork_begins_after_the_end_token(gateway: RunningGateway) -> None:
    async with gateway.worker(answers([*tokens("abc"), EOS], tokens("!"), reason="stop")) as worker:
        first = await gateway.chat(max_tokens=9)
        late = await fork(gateway, first, at=4)
        assert (late.status, late.error["param"], late.error["code"]) == (400, "at", "no_such_token")
        for place in ({}, {"at": 3}, {"at": "4.2"}):
            assert (await fork(gateway, first, **place)).status == 200
            assert worker.claimed[-1].prompt == worker.claimed[0].prompt + tuple(tokens("abc"))


async def test_each_prompt_of_a_completion_has_its_choices(gateway: RunningGateway) -> None:
    async with gateway.worker(answers(tokens("abc"), tokens("!"))) as worker:
        first = await gateway.complete(prompt=["Hello", "World"], n=2, max_tokens=3)
        path = "/v1/completions"
        answer = await fork(gateway, first, path, choice=3, at=2, max_tokens=1)
        assert answer.json["choices"][0]["text"] == "!"
        assert worker.claimed[-1].prompt == tuple(tokens("World")) + tuple(tokens("ab"))
        assert (await fork(gateway, first, path, choice=4)).error["param"] == "choice"
        assert (await fork(gateway, first, path, at="2")).error["param"] == "at"


async def test_a_call_without_its_prompt_cannot_be_forked(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens(TEXT))):
        first = await gateway.chat(max_tokens=30)
    broker = gateway.gateway.broker
    await broker.client.hdel(broker.keys.request(first.json["id"].removeprefix("chatcmpl-")), "body")
    assert (await fork(gateway, first, at=1)).error["code"] == "prompt_not_kept"


@pytest.fixture
async def thinker(start_gateway: Start, tmp_path: Any) -> RunningGateway:
    folder = write_model(tmp_path / "thinker", byte_level())
    return await start_gateway(model=str(folder), tool_call_format="hermes", reasoning_format="think")


def message(reply: Reply) -> dict[str, Any]:
    assert reply.status == 200, reply.json
    found: dict[str, Any] = reply.json["choices"][0]["message"]
    return found


@pytest.mark.parametrize(
    ("kept", "reasoning", "content"),
    [
        ("", "one two", "Three."),
        ("<think>one", "two", "Three."),
        ("<think>one two</think>", None, "Three."),
        ("<think>one two</think>Thr", None, "ee."),
    ],
)
async def test_reasoning_goes_on_where_it_was(
    thinker: RunningGateway, kept: str, reasoning: str | None, content: str
) -> None:
    async with thinker.worker(answers(letters(THOUGHT), letters(THOUGHT[len(kept) :]))):
        first = await thinker.post("/v1/chat/completions", chat_body(model="thinker", max_tokens=60))
        assert message(first)["content"] == "Three."
        rest = message(await fork(thinker, first, at=len(kept)))
    assert (rest.get("reasoning_content", "").strip() or None, rest["content"]) == (reasoning, content)


async def test_a_fork_is_before_or_after_a_tool_call_but_not_inside(thinker: RunningGateway) -> None:
    both = f"Well.{CALL}{CALL}"
    body = chat_body(model="thinker", max_tokens=200, tools=TOOLS)
    async with thinker.worker(answers(letters(both), letters(CALL))):
        first = await thinker.post("/v1/chat/completions", body)
        assert len(message(first)["tool_calls"]) == 2
        for inside in (
            len("Well.<tool"),
            len("Well.<tool_call>\n"),
            len("Well.") + len(CALL) - 30,
            len("Well.") + len(CALL) - 4,
        ):
            refused = await fork(thinker, first, at=inside)
            assert (refused.status, refused.error["code"]) == (400, "inside_tool_call"), inside
        for outside in (len("We"), len("Well."), len("Well.") + len(CALL)):
            [made] = message(await fork(thinker, first, at=outside))["tool_calls"]
            assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 1})


async def test_a_stream_of_a_fork_has_events_of_its_own_and_is_resumed(gateway: RunningGateway) -> None:
    async with gateway.worker(answers(tokens(TEXT), tokens(" Two boats."))):
        first = await gateway.chat(max_tokens=30)
        events = await gateway.events(f"/v1/chat/completions/{first.json['id']}/fork", {"at": 4, "stream": True})
        assert "".join(texts(events)) == " Two boats."
        path = f"/v1/chat/completions/{events[0].data['id']}/stream"
        async with gateway.stream(path, Last_Event_ID="4") as stream:
            assert await stream.rest() == [event for event in events if event.id > EventId(4)]


async def create(gateway: RunningGateway, **params: Any) -> Reply:
    return await gateway.post("/v1/responses", params)


async def test_a_response_is_forked_by_its_id_and_a_place(gateway: RunningGateway) -> None:
    async with gateway.worker(answers(tokens(TEXT), tokens("!"))) as worker:
        first = await create(gateway, model=MODEL, input="Hello", max_output_tokens=30, seed=5, temperature=0.5)
        named = {"previous_response_id": first.json["id"], "store": False}
        one = await create(gateway, **named, at=10, temperature=0.75)
        assert one.status == 200, one.json
        assert one.json["output"][0]["content"][0]["text"] == "!"
        fields = ("previous_response_id", "store", "temperature")
        assert [one.json[name] for name in fields] == [first.json["id"], False, 0.75]
        other = await create(
            gateway, **named, model=MODEL, at="10", input=" yes", instructions=None, max_output_tokens=3
        )
        assert other.status == 200, other.json
        same = await gateway.post(f"/v1/responses/{first.json['id']}/fork", {"at": 10, "temperature": 0.75})
        assert same.status == 200
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.responses.create(**named, stream=True, extra_body={"at": 10})
            assert [event.type async for event in stream][-1] == "response.incomplete"  # by length
        # Without a place it is the next turn.
        turn = await create(gateway, model=MODEL, **named, input="Again.")
        assert turn.status == 200
    original, forked, continued, twin, _, next_turn = worker.claimed
    assert forked.prompt == twin.prompt == original.prompt + tuple(tokens(TEXT)[:10])
    assert forked.sampling == twin.sampling
    assert (forked.forked_from, forked.num_kept) == (original.id, 10)
    assert continued.prompt == forked.prompt + tuple(tokens(" yes"))
    assert continued.sampling.max_tokens == 3
    assert next_turn.forked_from == ""


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"store": True}, "store"),
        ({"store": None}, "store"),
        ({"input": [{"role": "user", "content": "x"}]}, "input"),
        ({"continuation": "x"}, "continuation"),
        ({"instructions": "x"}, "instructions"),
        ({"tools": []}, "tools"),
        ({"text": {"format": {"type": "text"}}}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"at": 99}, "at"),
        ({"at": "x"}, "at"),
        ({"at": 0.5}, "at"),
        ({"temperature": 3}, "temperature"),
        ({"previous_response_id": None}, "previous_response_id"),
        ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id"),
        ({"previous_response_id": "nothing"}, "previous_response_id"),
        ({"model": "unknown"}, "model"),
    ],
)
async def test_what_a_fork_of_the_previous_response_cannot_take_is_named(
    gateway: RunningGateway, params: dict[str, Any], field: str
) -> None:
    async with gateway.worker(answers(tokens(TEXT), tokens("!"))):
        first = await create(gateway, model=MODEL, input="Hello", max_output_tokens=30)
        body = {"previous_response_id": first.json["id"], "store": False, "at": 3} | params
        reply = await create(gateway, **body)
    assert (reply.status, reply.error["param"]) == (404 if field == "model" else 400, field), reply.json
    if field == "store":
        assert "a fork is not stored" in reply.error["message"] or "required" in reply.error["message"]


async def test_a_response_that_is_not_stored_is_not_forked_by_its_id(gateway: RunningGateway) -> None:
    async with gateway.worker(answers(tokens(TEXT), tokens("!"))):
        first = await create(gateway, model=MODEL, input="Hello", max_output_tokens=30, store=False)
        reply = await create(gateway, previous_response_id=first.json["id"], store=False, at=3)
        assert reply.error["code"] == "previous_response_not_found"
        # Neither does a call that only counts tokens.
        count = await gateway.post("/v1/responses/input_tokens", {"model": MODEL, "input": "x", "at": 3})
        assert (count.status, count.error["param"]) == (400, "at")


@pytest.mark.parametrize("name", ["response_format", "tools", "tool_choice", "structured_outputs", "messages", "echo"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_fork_cannot_change_its_grammar_or_its_prompt(gateway: RunningGateway, path: str, name: str) -> None:
    async with gateway.worker(answers(tokens(TEXT), tokens("!"))):
        first = await (gateway.chat(max_tokens=30) if "chat" in path else gateway.complete(max_tokens=30))
        value = {"response_format": {"type": "json_object"}, "tools": TOOLS}.get(name, "x")
        reply = await fork(gateway, first, path, at=3, **{name: value})
    assert (reply.status, reply.error["param"]) == (400, name)
    assert "leave it out" in reply.error["message"]


async def test_a_fork_of_a_fork_counts_the_output_of_both(gateway: RunningGateway) -> None:
    async with gateway.worker(answers(tokens(TEXT), tokens("xyz"))) as worker:
        first = await gateway.chat(max_tokens=30, frequency_penalty=0.5)
        second = await fork(gateway, first, at=6)
        assert (await fork(gateway, second, at=2)).status == 200
    original, _, last = worker.claimed
    assert last.prompt == original.prompt + tuple(tokens(TEXT)[:6] + tokens("xyz")[:2])
    assert last.num_kept == 8


@pytest.mark.parametrize(
    ("continuation", "status"), [('"x"', 200), ('"x"}', 200), ("1", 400), ('"x"} more', 400), ("\0", 400)]
)
async def test_a_continuation_follows_the_grammar_of_the_answer(
    gateway: RunningGateway, continuation: str, status: int
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    async with gateway.worker(answers(tokens('{"a": "old"}'), tokens("!"))):
        first = await gateway.chat(max_tokens=30, response_format=form)
        reply = await fork(gateway, first, at=len(tokens('{"a": ')), continuation=continuation)
    assert reply.status == status, reply.json
    if status == 400:
        assert reply.error["param"] == "continuation"
        assert "a grammar that does not allow this text here" in reply.error["message"]

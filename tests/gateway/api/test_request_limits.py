"""Limits of model, server and workers are named in the errors of calls that exceed them."""

from __future__ import annotations

from typing import Any

from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.refusals import CHAT, COMPLETIONS, check
from tests.support.gateway.running import MODEL, RunningGateway, chat_body


async def test_more_than_the_context_holds(server: RunningGateway) -> None:
    reply = await server.complete(prompt=[1] * 500, max_tokens=20)
    assert reply.error["code"] == "context_length_exceeded"
    assert reply.error["message"].startswith(
        "This model's maximum context length is 512 tokens. However, you requested 520 tokens (500 in prompt, 20 in the"
    )
    reply = await server.chat(messages=[{"role": "user", "content": "x " * 2000}])
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "messages", "context_length_exceeded")


async def test_limits_of_this_server_are_named(server: RunningGateway) -> None:
    await check(server, CHAT, chat_body(n=5), 400, "n", "at most 4")
    await check(server, COMPLETIONS, {"model": MODEL, "prompt": ["x"] * 8, "n": 4}, 400, "n", "at most 16")
    await check(server, CHAT, chat_body(best_of=5), 400, "best_of", "best_of is 5; this server allows at most 4")
    await check(server, CHAT, chat_body(use_beam_search=True, beam_width=5), 400, "beam_width", "--max-n")
    many = {"model": MODEL, "prompt": ["x"] * 8}
    await check(server, COMPLETIONS, {**many, "best_of": 3}, 400, "best_of", "are 24; this server allows at most 16")
    await check(server, COMPLETIONS, {**many, "use_beam_search": True}, 400, "beam_width", "beam_width = 4 are 32")


async def test_no_call_asks_for_more_sequences_than_every_worker_runs(server: RunningGateway) -> None:
    async with server.worker(emit([65]), max_num_seqs=3), server.worker(emit([65]), max_num_seqs=2):
        await server.gateway.worker_registry.refresh()
        for asked, param in (
            ({"n": 3}, "n"),
            ({"best_of": 3}, "best_of"),
            ({"use_beam_search": True, "beam_width": 3}, "beam_width"),
            ({"use_beam_search": True}, "beam_width"),
        ):
            says = "at most 2 sequences at once (its setting --max-num-seqs)"
            await check(server, CHAT, chat_body(**asked), 400, param, says)
            await check(server, COMPLETIONS, {"model": MODEL, "prompt": "x", **asked}, 400, param, says)


async def test_a_model_that_is_not_here(server: RunningGateway) -> None:
    for name in ("gpt-9", "", "x\r\nSet-Cookie: a", "\x00", "\u2028", "{braces}"):
        await check(server, CHAT, chat_body(model=name), 404, "model", "no model")
    reply = await server.get("/v1/models/gpt-9")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_text_that_becomes_a_token_which_no_worker_has_is_refused(start_gateway: Start) -> None:
    """A tokenizer may know more tokens than the model: such an id must not get into a step with other requests."""
    gateway = await start_gateway()
    async with gateway.worker(emit([65]), vocab_size=300):
        await gateway.gateway.worker_registry.refresh()
        reply = await gateway.chat()
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "vocabulary 300" in reply.error["message"]


async def test_the_schema_of_an_answer_keeps_to_the_settings(start_gateway: Start) -> None:
    """In every form and dialect, as the schemas of tools do."""
    gateway = await start_gateway(max_schema_bytes=300, max_schema_depth=8)
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(4):
        deep = {"type": "object", "properties": {"a": deep}}
    big = {"enum": ["x" * 40] * 10}
    for schema, says in ((deep, "nested more than 8 levels deep (--max-schema-depth)"), (big, "at most 300")):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        name = "response_format.json_schema.schema"
        await check(gateway, CHAT, chat_body(response_format=form), 400, name, says)
        await check(gateway, CHAT, chat_body(guided_json=schema), 400, "guided_json", says)
        plain = {"model": MODEL, "prompt": "x"}
        await check(gateway, COMPLETIONS, {**plain, "response_format": form}, 400, name, says)
        text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
        body = {"model": MODEL, "input": "x", "text": text}
        await check(gateway, "/v1/responses", body, 400, "text.format.schema", says)
        message = chat_body(max_tokens=5, output_config={"format": {"type": "json_schema", "schema": schema}})
        reply = await gateway.post("/v1/messages", message)
        assert reply.status == 400
        assert says in reply.json["error"]["message"]
        assert reply.json["error"]["details"]["param"] == "output_config.format.schema"

"""Routes of completions, embeddings and tokenization."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.server.http_server import MAX_HEADER_BYTES, MAX_HEADERS
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import (
    CONTEXT,
    MODEL,
    TEMPLATE,
    RunningGateway,
    chat_body,
    raw_request,
    read_reply,
    tokens,
    write_model,
)
from tests.support.tokenizers import byte_level

# --- Tokens are those of a call, and the text of tokens comes back ----------------------------------------------------


TEXT = "Hello, wörld 😀"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]


async def test_the_answer_has_the_fields_of_vllm(gateway: RunningGateway) -> None:
    reply = await gateway.post("/tokenize", {"model": MODEL, "prompt": TEXT})
    expected = byte_level().encode(TEXT, add_special_tokens=True).ids
    assert (reply.status, reply.json) == (
        200,
        {"count": len(expected), "max_model_len": CONTEXT, "tokens": expected, "token_strs": None},
    )
    bare = await gateway.post("/tokenize", {"prompt": TEXT, "add_special_tokens": False, "return_token_strs": True})
    assert bare.json["tokens"] == tokens(TEXT)
    assert bare.json["token_strs"] == [byte_level().id_to_token(one) for one in tokens(TEXT)]


async def test_a_conversation_has_the_tokens_of_a_chat(gateway: RunningGateway) -> None:
    reply = await gateway.post("/tokenize", {"model": MODEL, "messages": MESSAGES})
    async with gateway.worker(emit(tokens("a"), "stop")):
        chat = await gateway.post("/v1/chat/completions", chat_body(messages=MESSAGES))
    assert reply.json["count"] == chat.json["usage"]["prompt_tokens"]
    text = (await gateway.post("/detokenize", {"tokens": reply.json["tokens"]})).json["prompt"]
    assert text.endswith(f"user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n")
    closed = await gateway.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert reply.json["tokens"][: closed.json["count"]] == closed.json["tokens"]
    assert closed.json["count"] < reply.json["count"]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% if loud %}LOUD{% endif %}" + TEMPLATE


@pytest.mark.parametrize("template", [WITH_TOOLS, TEMPLATE], ids=["told by the template", "told by the gateway"])
async def test_tools_and_template_variables_are_those_of_a_chat(
    start_gateway: Start, tmp_path: Path, template: str
) -> None:
    folder = write_model(tmp_path / MODEL, chat_template=template)
    gateway = await start_gateway(model=str(folder), tool_call_format="hermes")
    counts = []
    async with gateway.worker(emit(tokens("a"), "stop")):
        for more in (
            {},
            {"tools": [TOOL]},
            {"chat_template_kwargs": {"loud": True}},
            {"tools": [TOOL], "chat_template_kwargs": {"loud": True, "other": 1}},
            {"continue_final_message": True, "add_generation_prompt": False},
        ):
            reply = await gateway.post("/tokenize", {"messages": MESSAGES, **more})
            chat = await gateway.post("/v1/chat/completions", chat_body(messages=MESSAGES, max_tokens=1, **more))
            assert reply.json["count"] == chat.json["usage"]["prompt_tokens"], more
            counts.append(reply.json["count"])
            unknown = [name for name in more.get("chat_template_kwargs", {}) if name not in template]
            assert reply.headers.get("x-quire-no-effect", "") == ", ".join(
                f"chat_template_kwargs.{name}" for name in unknown
            )
    assert counts[1] > counts[0] > counts[4]
    assert (counts[2] > counts[0]) is (template is WITH_TOOLS)


async def test_a_text_comes_back(gateway: RunningGateway) -> None:
    for text in ["", TEXT, "x" * 3000, "  two  spaces "]:
        found = await gateway.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert (await gateway.post("/detokenize", {"model": MODEL, "tokens": found.json["tokens"]})).json == {
            "prompt": text
        }


async def test_a_prompt_over_the_context_is_counted_and_a_far_longer_one_refused(gateway: RunningGateway) -> None:
    reply = await gateway.post("/tokenize", {"prompt": "é" * CONTEXT})
    assert reply.status == 200
    assert reply.json["count"] > CONTEXT
    long = await gateway.post("/tokenize", {"prompt": "x" * (16 * CONTEXT + 1)})
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")


async def test_another_model_is_not_found(gateway: RunningGateway) -> None:
    for path, body in [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})]:
        reply = await gateway.post(path, {**body, "model": "another"})
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_what_a_call_refuses_is_refused(gateway: RunningGateway) -> None:
    reply = await gateway.post("/detokenize", {"tokens": [5, 10**6]})
    assert (reply.status, reply.error["param"]) == (400, "tokens[1]")
    assert (await gateway.post("/tokenize", b"{")).error["code"] == "invalid_json"
    assert (await gateway.get("/tokenize")).status == 405


async def test_the_tokenizer_is_shown_only_if_the_operator_allows_it(
    gateway: RunningGateway, start_gateway: Start
) -> None:
    hidden = await gateway.get("/tokenizer_info")
    assert (hidden.status, hidden.error["code"]) == (404, "not_found")
    assert "--tokenizer-info" in hidden.error["message"]
    shows = await start_gateway(tokenizer_info=True)
    for query in ("", f"?model={MODEL}"):
        reply = await shows.get(f"/tokenizer_info{query}")
        assert reply.status == 200
        found: dict[str, Any] = reply.json
        assert (found["eos_token"], found["chat_template"]) == ("</s>", TEMPLATE)
    other = await shows.get("/tokenizer_info?model=another")
    assert (other.status, other.error["code"]) == (404, "model_not_found")


# --- http server ------------------------------------------------------------------------------------------------------
# Below the application: errors of HTTP have the shape of the API, and every response the common headers.


async def test_every_response_has_the_common_headers(gateway: RunningGateway) -> None:
    for data in (raw_request("GET", "/healthz"), raw_request("GET", "/nothing"), b"no HTTP at all\r\n\r\n"):
        reply = await gateway.send(data)
        assert reply.headers["server"] == "quire"
        assert reply.headers["x-content-type-options"] == "nosniff"


async def test_a_head_that_is_too_large_is_refused_and_counted(gateway: RunningGateway) -> None:
    long = await gateway.send(raw_request("GET", "/healthz", headers={"X-Long": "x" * (MAX_HEADER_BYTES + 1)}))
    many = await gateway.send(raw_request("GET", "/healthz", headers={f"X-{n}": "1" for n in range(MAX_HEADERS + 1)}))
    for reply in (long, many):
        assert (reply.status, reply.error["code"]) == (431, "headers_too_large")
    meters = gateway.gateway.meters
    assert meters.http["other", "431"] == meters.refusals["headers_too_large"] == 2


async def test_a_slash_at_the_end_of_a_path_does_not_count(gateway: RunningGateway) -> None:
    models = await gateway.get("/v1/models/")
    assert (models.status, models.body) == (200, (await gateway.get("/v1/models")).body)
    assert (await gateway.get(f"/v1/models/{MODEL}/")).status == 200
    async with gateway.worker(emit(tokens("a"), "stop")):
        reply = await gateway.post("/v1/chat/completions/", chat_body())
    assert reply.status == 200
    assert gateway.gateway.meters.http["/v1/chat/completions", "200"] == 1
    # The query stays, and an absolute path is the same one.
    assert "'worker'" in (await gateway.get("/status/?worker=1")).error["message"]
    assert (await gateway.get("http://test/v1/models/")).status == 200
    for path in ("/", "/chat.js/"):
        assert (await gateway.get(path)).status == 200
    for path in ("/v1/models//", "/v1/%2F"):
        assert (await gateway.get(path)).status == 404
    assert (await gateway.send(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")).status in (400, 404, 405)


async def test_a_client_that_waits_for_100_gets_it(gateway: RunningGateway) -> None:
    body = b'{"prompt": "x", "add_special_tokens": false}'
    head = raw_request("POST", "/tokenize", b"", {"Expect": "100-Continue", "Content-Length": str(len(body))})
    reader, writer = await gateway.connect(head)
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    reply = await asyncio.wait_for(read_reply(reader), 60)
    writer.close()
    assert (reply.status, reply.json["count"]) == (200, 1)

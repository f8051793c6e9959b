"""Routes of completions, embeddings and tokenization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import CONTEXT, MODEL, TEMPLATE, RunningGateway, chat_body, tokens, write_model
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

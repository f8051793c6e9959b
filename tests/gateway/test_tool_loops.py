"""Two turns of a tool loop in each dialect, for chat templates that take tool calls in one form only."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.support.gateway.agents import prompt_of, saying
from tests.support.gateway.running import MODEL, RunningGateway, write_model
from tests.support.tool_templates import TOOL_TEMPLATES, tool_template

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
QUESTION = "How is the weather in Bonn and Rome?"
CITIES, RESULTS = ("Bonn", "Rome"), ("SUN", "RAIN")
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in CITIES
)


async def chat(gateway: RunningGateway) -> Any:
    body = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = await gateway.post("/v1/chat/completions", {**body, "messages": messages})
    asked = first.json["choices"][0]["message"]
    messages.append(asked)
    for call, text in zip(asked["tool_calls"], RESULTS, strict=True):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return await gateway.post("/v1/chat/completions", {**body, "messages": messages})


async def response(gateway: RunningGateway) -> Any:
    body = {"model": MODEL, "tools": [{"type": "function", **FUNCTION}]}
    first = (await gateway.post("/v1/responses", {**body, "input": QUESTION})).json
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": text}
        for item, text in zip(first["output"], RESULTS, strict=True)
    ]
    return await gateway.post("/v1/responses", {**body, "previous_response_id": first["id"], "input": outputs})


async def message(gateway: RunningGateway) -> Any:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = {"model": MODEL, "tools": tools, "max_tokens": 200}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = (await gateway.post("/v1/messages", {**body, "messages": messages})).json
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": text}
        for block, text in zip(first["content"], RESULTS, strict=True)
    ]
    messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    return await gateway.post("/v1/messages", {**body, "messages": messages})


@pytest.mark.slow
@pytest.mark.parametrize("rule", TOOL_TEMPLATES)
async def test_the_model_sees_its_calls_and_their_results(start_gateway: Start, tmp_path: Any, rule: str) -> None:
    folder = write_model(tmp_path / "test-model", chat_template=TOOL_TEMPLATES[rule])
    gateway = await start_gateway(model=str(folder), tool_call_format="hermes")
    prompts = set()
    for dialect in (chat, response, message):
        async with gateway.worker(saying(CALLS)) as worker:
            reply = await dialect(gateway)
            assert reply.status == 200, (dialect.__name__, reply.json)
        text = prompt_of(worker.claimed[1])
        for one in (QUESTION, *(f'{{"city": "{city}"}}' for city in CITIES), *RESULTS):
            assert text.count(one) == 1, (dialect.__name__, one, text)
        prompts.add(re.sub(r"[0-9a-f]{9}(?=\{)", "", text))  # without the ids of the calls
    assert len(prompts) == 1, "all dialects write one prompt"


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*TOOL_TEMPLATES, "argument by argument"])
async def test_a_call_without_whole_arguments_may_be_sent_back(start_gateway: Start, tmp_path: Any, rule: str) -> None:
    """The SDKs' own message of an answer that was cut off: in each turn after it, and for each template."""
    by_name = "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    templates = {**TOOL_TEMPLATES, "argument by argument": tool_template(call="0").replace("{{ 0 }}", by_name)}
    folder = write_model(tmp_path / "test-model", chat_template=templates[rule])
    gateway = await start_gateway(model=str(folder), tool_call_format="hermes")
    cut = '{"city": "Bo'
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": cut}}
    said = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": cut}
    output = {"type": "function_call_output", "call_id": "c", "output": "broken"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": [*said, {"role": "tool", "tool_call_id": "c", "content": "broken"}]}),
        ("chat/completions", {"messages": [*said, {"role": "user", "content": "broken"}]}),
        ("responses", {"input": [{"role": "user", "content": QUESTION}, item, output]}),
        ("responses", {"input": [{"role": "user", "content": QUESTION}, {**item, "status": "incomplete"}, output]}),
    ]
    async with gateway.worker(saying("Yes.")) as worker:
        for path, body in bodies:
            reply = await gateway.post(f"/v1/{path}", {"model": MODEL, **body})
            assert reply.status == 200, reply.json
            text = prompt_of(worker.claimed[-1])
            assert "city" in text.partition(QUESTION)[2]
            assert text.index("Bo") < text.index("broken")


@pytest.mark.parametrize(("rule", "is_parallel"), [("any form", True), ("one call", False)])
async def test_the_grammar_allows_as_many_calls_as_the_template_takes(
    start_gateway: Start, tmp_path: Any, rule: str, is_parallel: bool
) -> None:
    folder = write_model(tmp_path / "test-model", chat_template=TOOL_TEMPLATES[rule])
    gateway = await start_gateway(model=str(folder), tool_call_format="hermes")
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    body |= {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
    grammars = []
    for allowed in (None, False):
        async with gateway.worker(saying(CALLS)) as worker:
            reply = await gateway.post("/v1/chat/completions", {**body, "parallel_tool_calls": allowed})
            assert reply.status == 200, reply.json
        grammars.append(worker.claimed[0].sampling.grammar)
    assert (grammars[0] != grammars[1]) == is_parallel

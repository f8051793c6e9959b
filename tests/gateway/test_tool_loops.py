"""Loops of tool calls with the templates of models, and the roles that templates take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.api.test_conversation import TEMPLATE, answering
from tests.gateway.conftest import Start
from tests.support.chat_templates import STRICT_TEMPLATES, TOOL_TEMPLATES, tool_template
from tests.support.gateway.agents import prompt_of, saying
from tests.support.gateway.response_calls import PATH, create, prompt, raw_events
from tests.support.gateway.running import MODEL, RunningGateway, write_model

# --- Two turns of a tool loop in each dialect, for chat templates that take tool calls in one form only ---------------


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


# --- Orders of roles that a chat template refuses: each dialect and `/tokenize` bring them into the same --------------


CONVERSATIONS = {
    "first request": ["developer", "user", "user"],
    "two heads": ["system", "developer", "user"],
    "resumed": ["developer", "user", "assistant", "developer", "user"],
    "system after the question": ["system", "user", "system"],
    "two answers": ["user", "assistant", "assistant", "user"],
}
TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}


def messages(roles: list[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": f"text{at}"} for at, role in enumerate(roles)]


def bodies(roles: list[str]) -> dict[str, dict[str, Any]]:
    said = messages(roles)
    named = [{**one, "role": one["role"].replace("developer", "system")} for one in said]
    return {
        "/v1/chat/completions": {"messages": said},
        "/v1/responses": {"input": said},
        "/v1/messages": {"messages": named, "max_tokens": 5},
    }


@pytest.fixture(params=STRICT_TEMPLATES)
async def strict(start_gateway: Start, tmp_path: Any, request: pytest.FixtureRequest) -> RunningGateway:
    folder = write_model(tmp_path / "test-model", chat_template=STRICT_TEMPLATES[request.param])
    return await start_gateway(model=str(folder))


async def test_the_model_sees_all_texts_in_order(strict: RunningGateway) -> None:
    async with strict.worker(saying("Yes.")) as worker:
        for name, roles in CONVERSATIONS.items():
            for path, body in bodies(roles).items():
                reply = await strict.post(path, {"model": MODEL, **body})
                assert reply.status == 200, (name, path, reply.json)
                text = prompt_of(worker.claimed[-1])
                places = [text.index(f"text{at}") for at in range(len(roles))]
                assert places == sorted(places), (name, path)
            asked = await strict.post("/tokenize", {"messages": messages(roles), "add_generation_prompt": True})
            assert asked.json["tokens"] == list(worker.claimed[-3].prompt), name


async def test_tools_and_a_question_right_after_a_result(strict: RunningGateway) -> None:
    """A user who interrupts an agent: the next question follows the result of a tool."""
    call = {"id": "call_12345", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = [
        *messages(["system", "user"]),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_12345", "content": "result"},
        {"role": "user", "content": "stop"},
        {"role": "system", "content": "late"},
    ]
    body = {"model": MODEL, "messages": said, "tools": [{"type": "function", "function": TOOL}]}
    async with strict.worker(saying("Yes.")) as worker:
        reply = await strict.post("/v1/chat/completions", body)
        assert reply.status == 200, reply.json
    text = prompt_of(worker.claimed[0])
    places = [text.index(word) for word in ("text0", "text1", "result", "stop", "late")]
    assert places == sorted(places)


# --- Functions within namespaces, as Codex offers MCP tools and sub-agents: over HTTP, in all forms of an -------------


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER_FUNCTION = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "strict": False,
    "parameters": PARAMETERS,
}
# As Codex 0.171 sends it.
SPACE = {
    "type": "namespace",
    "name": "mcp__w",
    "description": "Tools in the mcp__w namespace.",
    "tools": [WEATHER_FUNCTION],
}
ADDITIONAL = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [SPACE]}
CHOICE = {"type": "function", "namespace": "mcp__w", "name": "get_weather"}
USER = {"role": "user", "content": "Weather?"}
CALL = '<tool_call>\n{"name": "mcp__w__get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
NAMES = {"namespace": "mcp__w", "name": "get_weather"}


@pytest.fixture
async def codex_gateway(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    folder = write_model(tmp_path / "test-model", chat_template=TEMPLATE)
    return await start_gateway(model=str(folder), tool_call_format="hermes", reasoning_format="think")


def named(item: dict[str, Any]) -> dict[str, Any]:
    return {key: item.get(key) for key in NAMES}


@pytest.mark.parametrize("given", [{"tools": [SPACE]}, {"input": [ADDITIONAL, USER]}], ids=["tools", "item"])
async def test_an_answer_has_the_namespace_in_all_its_forms(
    codex_gateway: RunningGateway, given: dict[str, Any]
) -> None:
    body = {"model": MODEL, "input": [USER], **given, "tool_choice": CHOICE}
    async with codex_gateway.worker(answering(CALL)) as worker:
        whole = (await codex_gateway.post(PATH, body)).json
        events = await raw_events(codex_gateway, PATH, {**body, "stream": True})
        response_id = events[0]["response"]["id"]
        stored = (await codex_gateway.get(f"{PATH}/{response_id}")).json
        resumed = await raw_events(codex_gateway, f"{PATH}/{response_id}?stream=true&starting_after=1")
    assert '"name": "mcp__w__get_weather"' in prompt(worker.claimed[0])
    assert "mcp__w__get_weather" in worker.claimed[0].sampling.grammar
    for output in (whole["output"], stored["output"], events[-1]["response"]["output"]):
        [call] = output
        assert named(call) == NAMES
        assert json.loads(call["arguments"]) == {"city": "Bonn"}
    assert resumed == events[2:]
    assert [named(event["item"]) for event in events if "item" in event] == [NAMES, NAMES]
    [done] = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done["name"] == "get_weather"
    assert whole["tools"][0]["tools"][0]["name"] == "get_weather"
    assert whole["tool_choice"] == CHOICE


@pytest.mark.parametrize("given", [{"tools": [SPACE]}, {"input": [ADDITIONAL, USER]}], ids=["tools", "item"])
async def test_the_next_turn_with_stored_and_with_sent_items(
    codex_gateway: RunningGateway, given: dict[str, Any]
) -> None:
    body = {"model": MODEL, "input": [USER], **given}
    async with codex_gateway.worker(answering(CALL)):
        first = (await codex_gateway.post(PATH, body)).json
    [call] = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "SUN"}
    more: dict[str, Any] = {key: value for key, value in given.items() if key == "tools"}
    following = [
        {**more, "input": [output], "previous_response_id": first["id"]},
        {**body, "input": [*body["input"], call, output]},
    ]
    async with codex_gateway.worker(answering(CALL)) as worker:
        answers = [(await codex_gateway.post(PATH, {"model": MODEL, **one})).json for one in following]
    assert [[named(item) for item in answer["output"]] for answer in answers] == [[NAMES], [NAMES]]
    prompts = [prompt(request) for request in worker.claimed]
    assert prompts[0] == prompts[1]
    assert '<tool_call>mcp__w__get_weather{"city": "Bonn"}</tool_call>' in prompts[0]
    assert '"name": "mcp__w__get_weather"' in prompts[0], "the tools of the item hold in later calls"


async def test_choices_among_namespaces(codex_gateway: RunningGateway) -> None:
    other = {**SPACE, "name": "mcp__v"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp__w"}]}
    async with codex_gateway.worker(answering(CALL)) as worker:
        reply = await create(codex_gateway, tools=[other, SPACE], tool_choice=allowed)
        assert reply.status == 200, reply.json
    assert "mcp__v__" not in prompt(worker.claimed[0])
    for choice in ({**CHOICE, "namespace": "mcp__x"}, {"type": "function", "name": "get_weather"}):
        reply = await create(codex_gateway, tools=[SPACE], tool_choice=choice)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")


async def test_an_error_names_the_place_within_the_namespace(codex_gateway: RunningGateway) -> None:
    wrong = {
        **WEATHER_FUNCTION,
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "strange"}}},
    }
    spaces = [{**SPACE, "tools": [wrong]}]
    for given, place in (
        ({"tools": spaces}, "tools[0].tools[0].parameters"),
        ({"input": [USER, {**ADDITIONAL, "tools": spaces}]}, "input[1].tools[0].tools[0].parameters"),
    ):
        reply = await create(codex_gateway, **given)
        assert (reply.status, reply.error["param"]) == (400, place)


# --- The requests of coding agents that speak Responses, as public issues and sources describe them, replayed ---------


SHELL_CALL = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
EXEC_COMMAND = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
TOOLS = [
    EXEC_COMMAND,
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
    },
    {"type": "namespace", "name": "mcp__files", "description": "", "tools": [{"type": "function", "name": "read"}]},
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
]
TURN: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199c0de-0000-7000-8000-000000000000",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-installation-id": "0"},
}
INPUT = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Permissions: none."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
]


def long_model(folder: Path, template: str) -> Path:
    """A model whose context has room for an agent's prompt."""
    write_model(folder, chat_template=template)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_model(tmp_path_factory.mktemp("agents") / "test-model", TEMPLATE)


@pytest.fixture
async def agent_gateway(start_gateway: Start, folder: Path) -> RunningGateway:
    return await start_gateway(model=str(folder), tool_call_format="hermes", reasoning_format="think")


async def test_a_turn_with_a_tool(agent_gateway: RunningGateway) -> None:
    """The agent keeps the conversation itself and sends everything with each request: `store` is false."""
    async with agent_gateway.worker(answering("<think>\nFiles.</think>" + SHELL_CALL)):
        events = await raw_events(agent_gateway, PATH, {**TURN, "input": INPUT})
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "function_call"]
    last = events[-1]
    assert last["type"] == "response.completed"
    # Agents read these fields at the end of a turn.
    assert last["response"]["id"].startswith("resp_")
    assert set(last["response"]["usage"]) == {
        "input_tokens",
        "input_tokens_details",
        "output_tokens",
        "output_tokens_details",
        "total_tokens",
    }
    skipped = [warning["param"] for warning in last["response"]["warnings"]]
    assert skipped[:4] == [f"tools[{index}]" for index in (1, 3, 4, 5)]
    # Without ids and statuses, as with `store: false`; nothing was encrypted.
    reasoning = {"type": "reasoning", "summary": [], "content": done[0]["content"], "encrypted_content": None}
    call = {key: done[1][key] for key in ("type", "name", "arguments", "call_id")}
    output = {"type": "function_call_output", "call_id": done[1]["call_id"], "output": "a.py\n"}
    async with agent_gateway.worker(answering("One file.")) as worker:
        events = await raw_events(agent_gateway, PATH, {**TURN, "input": [*INPUT, reasoning, call, output]})
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "One file."
    told = prompt(worker.claimed[0])
    assert "You are a coding agent.\n\nPermissions: none." in told
    assert '"name": "exec_command"' in told
    assert '"name": "mcp__files__read"' in told
    assert "apply_patch" not in told
    assert '<tool_call>exec_command{"cmd": "ls"}</tool_call>' in told
    assert "<|im_start|>tool\na.py\n<|im_end|>" in told


async def test_tools_in_an_item_are_those_of_the_parameter(agent_gateway: RunningGateway) -> None:
    """As Codex sends them to models with newer names: with `custom` tools, which no model gets."""
    item = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
    found = []
    async with agent_gateway.worker(answering("Hello.")) as worker:
        for given in ({"input": INPUT}, {"input": [item, *INPUT], "tools": []}):
            reply = await create(agent_gateway, **{**TURN, "stream": False, **given})
            assert reply.status == 200, reply.json
            skipped = [name for name in reply.headers["x-quire-no-effect"].split(", ") if "tools[" in name]
            assert skipped == [warning["param"] for warning in reply.json["warnings"]][: len(skipped)]
            found.append((reply.json["tools"], [name.removeprefix("input[0].") for name in skipped]))
    assert found[0] == found[1]
    assert found[0][1] == [f"tools[{index}]" for index in (1, 3, 4, 5)]
    first, second = map(prompt, worker.claimed)
    assert first == second
    assert "apply_patch" not in first


@pytest.mark.parametrize("given", ["", []], ids=["text", "items"])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_probe_with_an_empty_input(agent_gateway: RunningGateway, given: Any, stream: bool) -> None:
    body = {"model": MODEL, "input": given, "max_output_tokens": 1, "stream": stream}
    async with agent_gateway.worker(answering("H", reason="length")) as worker:
        if stream:
            response = (await raw_events(agent_gateway, PATH, body))[-1]["response"]
        else:
            response = (await agent_gateway.post(PATH, body)).json
    assert response["status"] == "incomplete"
    assert worker.claimed[0].sampling.max_tokens == 1
    assert prompt(worker.claimed[0]).startswith("<|im_start|>user\n<|im_end|>")


async def test_a_resumed_thread_on_a_template_that_takes_a_system_message_only_at_the_head(
    start_gateway: Start, tmp_path: Path
) -> None:
    """Codex 0.171: `exec resume` with other permissions sends a new `developer` message before the question."""
    folder = long_model(tmp_path / "test-model", STRICT_TEMPLATES["system at the head"])
    agent_gateway = await start_gateway(model=str(folder))
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "None."}]}
    changed = {**INPUT[0], "content": [{"type": "input_text", "text": "Permissions: all."}]}
    async with agent_gateway.worker(answering("One.")) as worker:
        await raw_events(agent_gateway, PATH, {**TURN, "input": [*INPUT, answer, changed, INPUT[2]]})
    question = "<|im_start|>user\n<system>\nPermissions: all.\n</system>\n\nList the files.<|im_end|>"
    assert question in prompt(worker.claimed[0])

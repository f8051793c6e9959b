"""The requests of coding agents that speak Responses, as public issues and sources describe them, replayed over HTTP.

Sources: openai/codex `codex-rs/codex-api/src/common.rs` (fields of a request); NousResearch/hermes-agent #910 and
SEMOSS/Semoss #2532 (fields that are always there); ikawrakow/ik_llama.cpp #1964 (types of tools, the probe);
unslothai/unsloth #5141 (a server that refused unknown types of tools).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.api.test_conversation import TEMPLATE, answering
from tests.gateway.conftest import Start
from tests.support.chat_templates import STRICT_TEMPLATES
from tests.support.gateway.response_calls import PATH, create, prompt, raw_events
from tests.support.gateway.running import MODEL, RunningGateway, write_model

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
async def gateway(start_gateway: Start, folder: Path) -> RunningGateway:
    return await start_gateway(model=str(folder), tool_call_format="hermes", reasoning_format="think")


async def test_a_turn_with_a_tool(gateway: RunningGateway) -> None:
    """The agent keeps the conversation itself and sends everything with each request: `store` is false."""
    async with gateway.worker(answering("<think>\nFiles.</think>" + SHELL_CALL)):
        events = await raw_events(gateway, PATH, {**TURN, "input": INPUT})
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
    async with gateway.worker(answering("One file.")) as worker:
        events = await raw_events(gateway, PATH, {**TURN, "input": [*INPUT, reasoning, call, output]})
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "One file."
    told = prompt(worker.claimed[0])
    assert "You are a coding agent.\n\nPermissions: none." in told
    assert '"name": "exec_command"' in told
    assert '"name": "mcp__files__read"' in told
    assert "apply_patch" not in told
    assert '<tool_call>exec_command{"cmd": "ls"}</tool_call>' in told
    assert "<|im_start|>tool\na.py\n<|im_end|>" in told


async def test_tools_in_an_item_are_those_of_the_parameter(gateway: RunningGateway) -> None:
    """As Codex sends them to models with newer names: with `custom` tools, which no model gets."""
    item = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
    found = []
    async with gateway.worker(answering("Hello.")) as worker:
        for given in ({"input": INPUT}, {"input": [item, *INPUT], "tools": []}):
            reply = await create(gateway, **{**TURN, "stream": False, **given})
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
async def test_the_probe_with_an_empty_input(gateway: RunningGateway, given: Any, stream: bool) -> None:
    body = {"model": MODEL, "input": given, "max_output_tokens": 1, "stream": stream}
    async with gateway.worker(answering("H", reason="length")) as worker:
        if stream:
            response = (await raw_events(gateway, PATH, body))[-1]["response"]
        else:
            response = (await gateway.post(PATH, body)).json
    assert response["status"] == "incomplete"
    assert worker.claimed[0].sampling.max_tokens == 1
    assert prompt(worker.claimed[0]).startswith("<|im_start|>user\n<|im_end|>")


async def test_only_tools_that_this_server_does_not_run(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("No tools.")) as worker:
        others = [tool for tool in TOOLS if tool["type"] not in ("function", "namespace")]
        reply = await create(gateway, tools=others, tool_choice="auto", prompt_cache_key="k")
    assert reply.status == 200
    assert reply.json["tools"] == []
    assert worker.claimed[0].sampling.grammar == ""
    assert reply.headers["x-quire-no-effect"].startswith("tools[0], tools[1]")


async def test_a_resumed_thread_on_a_template_that_takes_a_system_message_only_at_the_head(
    start_gateway: Start, tmp_path: Path
) -> None:
    """Codex 0.171: `exec resume` with other permissions sends a new `developer` message before the question."""
    folder = long_model(tmp_path / "test-model", STRICT_TEMPLATES["system at the head"])
    gateway = await start_gateway(model=str(folder))
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "None."}]}
    changed = {**INPUT[0], "content": [{"type": "input_text", "text": "Permissions: all."}]}
    async with gateway.worker(answering("One.")) as worker:
        await raw_events(gateway, PATH, {**TURN, "input": [*INPUT, answer, changed, INPUT[2]]})
    question = "<|im_start|>user\n<system>\nPermissions: all.\n</system>\n\nList the files.<|im_end|>"
    assert question in prompt(worker.claimed[0])


async def test_a_previous_response_that_was_not_stored_is_a_clean_error(gateway: RunningGateway) -> None:
    """An agent that gets this code sends the whole conversation again."""
    async with gateway.worker(answering("x")):
        events = await raw_events(gateway, PATH, {**TURN, "input": INPUT})
    reply = await create(gateway, previous_response_id=events[0]["response"]["id"])
    assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")


async def test_an_agent_that_stores_sends_only_what_is_new(gateway: RunningGateway) -> None:
    """The default of several SDKs: `store` is true, and the next request names the response before."""
    async with gateway.worker(answering(SHELL_CALL)):
        first = await create(gateway, input="List the files.", tools=[EXEC_COMMAND])
    [call] = first.json["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": json.dumps({"files": ["a.py"]})}
    async with gateway.worker(answering("One.")) as worker:
        second = await create(gateway, input=[output], tools=[EXEC_COMMAND], previous_response_id=first.json["id"])
    assert second.json["output"][0]["content"][0]["text"] == "One."
    assert '<|im_start|>tool\n{"files": ["a.py"]}<|im_end|>' in prompt(worker.claimed[0])


async def test_references_instead_of_items(gateway: RunningGateway) -> None:
    """An SDK that knows that a response is stored sends references to its items."""
    async with gateway.worker(answering("<think>\nHm.</think>" + SHELL_CALL)):
        first = await create(gateway, input="List the files.", tools=[EXEC_COMMAND])
    reasoning, call = first.json["output"]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "item_reference", "id": reasoning["id"]},
        {"type": "item_reference", "id": call["id"]},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"},
    ]
    async with gateway.worker(answering("One.")) as worker:
        second = await create(gateway, input=items, tools=[EXEC_COMMAND])
    assert second.status == 200
    assert "<tool_call>exec_command" in prompt(worker.claimed[0])

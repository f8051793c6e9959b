"""Orders of roles that a chat template refuses: each dialect and `/tokenize` bring them into the same prompt.

The conversations are those of coding agents: Codex sends `developer` messages also in resumed threads, and two messages
of the user in its first request; Claude Code sends messages of the system after the first question.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.support.chat_templates import STRICT_TEMPLATES
from tests.support.gateway.agents import prompt_of, saying
from tests.support.gateway.running import MODEL, RunningGateway, write_model

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

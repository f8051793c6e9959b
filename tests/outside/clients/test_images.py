"""Clients that send images: the SDKs `openai` and `anthropic`, npm's `ai`, LangChain, Codex CLI and Claude Code.

Each SDK sends an image of the user and one in the result of a tool to a server with a tiny model with images. The
server counts the tokens of the image, so it got the image.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.conftest import QuireProcess, clean_environ
from tests.outside.clients import test_coding_agents as agents
from tests.outside.clients.relay import Exchange, Relay
from tests.outside.clients.test_npm import PACKAGES
from tests.outside.environments import Case, Environments
from tests.support.vision_questions import random_picture
from tests.test_images import make_seeing

PICTURE = random_picture(random.Random(5))
BASE64 = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{BASE64}"
# Image tokens of a picture.
TOKENS = 16


@contextmanager
def serving(model: Path, *more: str) -> Iterator[str]:
    state = str(model.parent / "state")
    arguments = ("serve", str(model), "--port", "0", "--state-dir", state, "--dtype", "float32", *more)
    process = QuireProcess(arguments, clean_environ(), None)
    try:
        yield process.wait_ready()
        assert process.stop() == 0
    finally:
        process.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(make_seeing(tmp_path_factory.mktemp("images") / "seeing")) as url:
        yield url


@pytest.mark.slow
def test_openai_names_an_uploaded_image(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("a.png", PICTURE, "image/png"), purpose="vision")
        answers = []
        for source in ({"file_id": file.id}, {"image_url": URL}):
            image: Any = {"type": "input_image", "detail": "auto", **source}
            items: Any = [{"role": "user", "content": [image, {"type": "input_text", "text": "What is this?"}]}]
            answers.append(client.responses.create(model="seeing", input=items, max_output_tokens=9, temperature=0))
        client.files.delete(file.id)
        uploaded, sent = answers
        assert uploaded.output_text == sent.output_text
        assert uploaded.usage is not None
        assert uploaded.usage.input_tokens >= TOKENS
        call: dict[str, Any] = {"model": "seeing", "input": "And now?", "max_output_tokens": 9}
        later = client.responses.create(previous_response_id=uploaded.id, **call)
        assert later.usage is not None
        assert later.usage.input_tokens > uploaded.usage.input_tokens


@pytest.mark.slow
def test_anthropic_names_an_uploaded_image(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("a.png", PICTURE, "image/png"), purpose="user_data")
    call: dict[str, Any] = {"model": "seeing", "max_tokens": 9, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:

        def said(messages: Any, source: dict[str, Any]) -> tuple[str, int]:
            image = {"type": "image", "source": source}
            content = [image, {"type": "text", "text": "What is this?"}]
            answer = messages.create(messages=[{"role": "user", "content": content}], **call)
            return answer.content[0].text, answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

        in_body = {"type": "base64", "media_type": "image/png", "data": BASE64}
        uploaded = said(claude.beta.messages, {"type": "file", "file_id": file.id})
        assert uploaded == said(claude.messages, in_body)
        assert uploaded[1] >= TOKENS
        with pytest.raises(anthropic.BadRequestError, match="of the type image/png, but media_type is image/jpeg"):
            said(claude.messages, {**in_body, "media_type": "image/jpeg"})


def assert_saw(case: Case) -> None:
    """Assert that an answer came, and that the prompt had one image more than the one without it."""
    result = case.value()
    assert result["text"]
    assert result["with"] - result["without"] >= TOKENS


@pytest.fixture(scope="module")
def ai_cases(environments: Environments, url: str) -> dict[str, Case]:
    return environments.run_node("ai_images.mjs", url, PACKAGES)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["image", "tool"])
@pytest.mark.parametrize("provider", ["responses", "openai", "compatible", "anthropic"])
def test_ai_sends_an_image(ai_cases: dict[str, Case], provider: str, name: str) -> None:
    """The providers of the chat API send the result of a tool as JSON: the model gets the text of its base64."""
    assert_saw(ai_cases[f"{provider}_{name}"])


@pytest.fixture(scope="module")
def langchain_cases(environments: Environments, url: str) -> dict[str, Case]:
    requirements = ["langchain-openai==1.7.3", "langchain-core==1.7.2", "openai==3.54.0"]
    return environments.run_python("langchain_images_program.py", url, requirements)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["image", "tool"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_langchain_sends_an_image(langchain_cases: dict[str, Case], api: str, name: str) -> None:
    assert_saw(langchain_cases[f"{api}_{name}"])


@pytest.fixture(scope="module")
def agent_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with room for an agent's prompt, whose tokens are single bytes."""
    model = make_seeing(tmp_path_factory.mktemp("agents") / "seeing", context=131_072)
    with serving(model, "--served-model-name", "demo") as url:
        yield url


@pytest.fixture(scope="module")
def agent_programs(environments: Environments) -> Path:
    return environments.node(agents.PACKAGES, agents.SCRIPTS) / "node_modules" / ".bin"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    path.write_bytes(PICTURE)
    return path


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_codex_sends_an_image(agent_programs: Path, agent_url: str, tmp_path: Path, picture: Path) -> None:
    def change(exchange: Exchange) -> None:
        exchange.body |= {"tool_choice": "none", "max_output_tokens": 9}

    with Relay(agent_url) as relay:
        agent = agents.codex(agent_programs, relay, tmp_path)
        relay.change = change
        command = agent.command
        agent.command = lambda again: [*command(again)[:-1], "-i", str(picture), "-"]
        said = agent.tell("What is this?")
        [call] = agent.calls
        assert call.status == 200, said + call.answer
        assert '"input_image"' in json.dumps(call.body["input"])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_claude_code_reads_an_image(agent_programs: Path, agent_url: str, tmp_path: Path, picture: Path) -> None:
    """The first call must read the file, which the schema of the tool names."""
    schema = {"type": "object", "properties": {"file_path": {"enum": [str(picture)]}}, "required": ["file_path"]}
    is_read = False

    def change(exchange: Exchange) -> None:
        nonlocal is_read
        tools = {tool.get("name"): tool for tool in exchange.body.get("tools", [])}
        if "messages" not in exchange.body or "count_tokens" in exchange.path:
            return
        exchange.body["max_tokens"] = 9
        if "Read" in tools and not is_read:
            is_read = True
            tools["Read"]["input_schema"] = {**schema, "additionalProperties": False}
            exchange.body |= {
                "max_tokens": 400,
                "tool_choice": {"type": "tool", "name": "Read", "disable_parallel_tool_use": True},
            }
        elif tools:
            exchange.body["tool_choice"] = {"type": "none"}

    with Relay(agent_url) as relay:
        agent = agents.claude(agent_programs, relay, tmp_path)
        relay.change = change
        command = agent.command
        names = {"mcp__w__get_weather": "Read", "": "Read"}
        agent.command = lambda again: [names.get(part, part) for part in command(again)]
        said = agent.tell(f"What is in {picture}?")
        assert {call.status for call in agent.calls} == {200}, said + agent.calls[-1].answer
        [result] = agent.calls[-1].body["messages"][2]["content"][:1]
        assert result["type"] == "tool_result"
        assert result["content"][0]["type"] == "image"

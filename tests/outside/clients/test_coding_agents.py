"""Coding agents from npm: Codex CLI (Responses), Claude Code (Messages) and opencode (chat).

Each agent runs a tool, continues its thread, and reaches the end of the context. The chat templates are that of the
demo model, whose context gets room for an agent's prompt, and two that refuse some orders of roles.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.ops.paths import PROJECT_ROOT
from tests.conftest import QuireProcess, clean_environ
from tests.outside.clients.relay import Exchange, Exchanges, Relay, SocketRelay
from tests.outside.environments import PROGRAMS, Environments, run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
PACKAGES = ["@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197", "opencode-ai@1.18.33"]
# These scripts link the programs for this machine.
SCRIPTS = ["@anthropic-ai/claude-code/install.cjs", "opencode-ai/postinstall.mjs"]
DEMO = PROJECT_ROOT / "models" / "demo"
RUN_TIMEOUT_S = 600
CONTEXT = 24_576
# The beginnings of strict templates, with the messages of published ones: Qwen3.5, and Gemma 3 or Mistral.
CHECKS = {
    "any order": "",
    "system at the head": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    ),
    "alternating": (
        "{% set ns = namespace(index=0) %}{% for m in messages %}"
        "{% if not (loop.first and m.role == 'system') and m.role != 'tool' and not m.tool_calls %}"
        "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    ),
}
# The demo model follows this schema, so that its answers are short and known: a string has no room for spaces.
SCHEMA = {"type": "string", "enum": ["done"]}
SAID = '"done"'
RESULT = "sunny in "
QUESTION = "How is the weather?"


class Force:
    """Changes the requests of an agent: the first one with the tool must call it, the others must answer shortly."""

    def __init__(self, choice: dict[str, Any], none: Any, name: str, form: Any, limit: str) -> None:
        """choice: of the tool. none: the choice of no tool. name, form: the parameter of a JSON schema. limit: of
        tokens."""
        self._choice, self._none = choice, none
        self._name, self._form = name, form
        self._limit = limit
        self._is_over = False

    def __call__(self, exchange: Exchange) -> None:
        body = exchange.body
        if "count_tokens" in exchange.path or not {"messages", "input"} & body.keys():
            return
        if body.get("generate") is False:
            return  # it has no answer
        body[self._limit] = 200
        wanted = self._choice.get("function", self._choice)["name"]
        if not self._is_over and f'"{wanted}"' in json.dumps(body.get("tools", [])):
            self._is_over = True
            body["tool_choice"] = self._choice
            if "disable_parallel_tool_use" not in self._choice:
                body["parallel_tool_calls"] = False  # otherwise the demo model calls until it reaches the limit
            return
        if body.get("tools") or "input" in body:  # an item of the input may have tools
            body["tool_choice"] = self._none
        body[self._name] = {**body.get(self._name, {}), **self._form}


@dataclass
class Agent:
    """An agent that is told a text, in a new or in its last thread. path: of its calls."""

    relay: Exchanges
    path: str
    command: Callable[[bool], list[str]]
    home: Path
    variables: dict[str, str]

    def tell(self, text: str, again: bool = False) -> str:
        """Run the agent; returns all that it writes. again: in the thread before."""
        done = run(self.command(again), self.home, RUN_TIMEOUT_S, check=False, variables=self.variables, text=text)
        return done.stdout + done.stderr

    @property
    def calls(self) -> list[Exchange]:
        return self.relay.calls(self.path)


@pytest.fixture(scope="session")
def programs(environments: Environments) -> Path:
    return environments.node(PACKAGES, SCRIPTS) / "node_modules" / ".bin"


@pytest.fixture(scope="module", params=CHECKS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway that serves the demo model with one of the templates and a longer context."""
    folder = tmp_path_factory.mktemp("agents") / "demo"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("training*"))
    for name, change in (
        ("config.json", lambda config: {**config, "max_position_embeddings": CONTEXT}),
        (
            "tokenizer_config.json",
            lambda config: {**config, "chat_template": CHECKS[request.param] + config["chat_template"]},
        ),
    ):
        (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))
    arguments = ("serve", "--model", str(folder), "--port", "0", "--state-dir", str(folder.parent / "state"))
    process = QuireProcess(arguments, clean_environ(), None)
    try:
        yield process.wait_ready()
        assert process.stop() == 0
    finally:
        process.close()


MCP = [sys.executable, str(PROGRAMS / "mcp_weather.py")]


def codex(programs: Path, relay: Exchanges, home: Path) -> Agent:
    function = {"type": "function", "namespace": "mcp__w", "name": "get_weather"}
    form = {"format": {"type": "json_schema", "name": "said", "schema": SCHEMA}}
    relay.change = Force(function, "none", "text", form, "max_output_tokens")
    (home / "config.toml").write_text(
        'model = "demo"\nmodel_provider = "quire"\n[model_providers.quire]\nname = "quire"\n'
        f'base_url = "{relay.url}/v1"\nwire_api = "responses"\nenv_key = "OPENAI_API_KEY"\n'
        f"[mcp_servers.w]\ncommand = {json.dumps(MCP[0])}\nargs = {json.dumps(MCP[1:])}\n"
    )
    free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"]
    # Other permissions than before: Codex tells the model with a new `developer` message.
    other = ["resume", "--last", "--skip-git-repo-check", "-c", 'sandbox_mode="read-only"', "-"]
    command = [str(programs / "codex"), "exec"]
    return Agent(
        relay, "/v1/responses", lambda again: command + (other if again else free), home, {"CODEX_HOME": str(home)}
    )


def claude(programs: Path, relay: Relay, home: Path) -> Agent:
    function = {"type": "tool", "name": "mcp__w__get_weather", "disable_parallel_tool_use": True}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    relay.change = Force(function, {"type": "none"}, "output_config", form, "max_tokens")
    servers = json.dumps({"mcpServers": {"w": {"command": MCP[0], "args": MCP[1:]}}})
    command = [str(programs / "claude"), "-p", "--model", "demo", "--mcp-config", servers, "--strict-mcp-config"]
    command += ["--allowedTools", "mcp__w__get_weather", "--tools", "", "--system-prompt", "You are brief."]
    variables = {
        "ANTHROPIC_BASE_URL": relay.url,
        "ANTHROPIC_SMALL_FAST_MODEL": "demo",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CONFIG_DIR": str(home),
        "HOME": str(home),
    }
    return Agent(relay, "/v1/messages", lambda again: command + ["-c"] * again, home, variables)


def opencode(programs: Path, relay: Relay, home: Path) -> Agent:
    function = {"type": "function", "function": {"name": "w_get_weather"}}
    form = {"type": "json_schema", "json_schema": {"name": "said", "schema": SCHEMA}}
    relay.change = Force(function, "none", "response_format", form, "max_tokens")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{relay.url}/v1", "apiKey": "none"},
        "models": {"demo": {"limit": {"context": CONTEXT, "output": 1000}}},
    }
    config = {
        "autoupdate": False,
        "small_model": "quire/demo",
        "provider": {"quire": provider},
        "mcp": {"w": {"type": "local", "command": MCP}},
        "permission": "allow",
    }
    (home / "opencode.json").write_text(json.dumps(config))
    variables = {f"XDG_{name}_HOME": str(home / name) for name in ("CONFIG", "DATA", "CACHE", "STATE")}
    variables |= {
        "HOME": str(home),
        "OPENCODE_CONFIG": str(home / "opencode.json"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    command = [str(programs / "opencode"), "run", "--model", "quire/demo"]
    return Agent(relay, "/v1/chat/completions", lambda again: command + ["-c"] * again, home, variables)


def read_calls(agent: Agent) -> list[int]:
    return [call.status for call in agent.calls]


def test_codex(programs: Path, url: str, tmp_path: Path) -> None:
    with Relay(url) as relay:
        agent = codex(programs, relay, tmp_path)
        assert SAID in agent.tell(QUESTION)
        first, second = agent.calls
        assert {"mcp__w", "multi_agent_v1"} <= {tool.get("name") for tool in first.body["tools"]}
        call, output = second.body["input"][-2:]
        assert (call["namespace"], call["name"]) == ("mcp__w", "get_weather")
        assert RESULT in json.dumps(output["output"])
        # A resumed thread has a `developer` message after answers.
        assert SAID in agent.tell("And now?", again=True)
        roles = [item.get("role") for item in agent.calls[-1].body["input"]]
        assert "developer" in roles[roles.index("assistant") :]
        assert set(read_calls(agent)) == {200}
        # A full context.
        said = agent.tell("word " * CONTEXT, again=True)
        assert "context window" in said, said
        assert agent.calls[-1].status == 400


def test_codex_with_the_name_of_a_model_that_gets_its_tools_in_an_item(
    programs: Path, url: str, tmp_path: Path
) -> None:
    """Codex sees the name gpt-5.6-sol, and the relay sends `demo` to the server."""
    with Relay(url) as relay:
        agent = codex(programs, relay, tmp_path)
        shorten = relay.change

        def change(exchange: Exchange) -> None:
            shorten(exchange)
            exchange.body["model"] = "demo"

        relay.change = change
        config = (tmp_path / "config.toml").read_text()
        (tmp_path / "config.toml").write_text(config.replace('model = "demo"', 'model = "gpt-5.6-sol"', 1))
        assert SAID in agent.tell(QUESTION)
        assert agent.calls[0].body["input"][0]["type"] == "additional_tools"
        assert set(read_calls(agent)) == {200}


def test_codex_over_a_websocket(programs: Path, url: str, tmp_path: Path) -> None:
    """Codex warms its connection up, and continues it by `previous_response_id`."""
    with SocketRelay(url) as relay:
        agent = codex(programs, relay, tmp_path)
        config = (tmp_path / "config.toml").read_text()
        # It waits for the warm-up as long as for a connection.
        more = "supports_websockets = true\nwebsocket_connect_timeout_ms = 120000\n"
        config = config.replace("[mcp_servers", f"{more}[mcp_servers")
        (tmp_path / "config.toml").write_text(config)
        assert SAID in agent.tell(QUESTION)
        # The warm-up may lack the tools of an MCP server that still starts; then Codex does not continue it.
        _, first, second = agent.calls
        assert second.body["previous_response_id"] == json.loads(first.answer)["response"]["id"]
        assert [item["type"] for item in second.body["input"]] == ["function_call_output"]
        assert RESULT in json.dumps(second.body["input"])
        assert SAID in agent.tell("And now?", again=True)
        before = len(agent.calls)
        (tmp_path / "config.toml").write_text(config.partition("[mcp_servers")[0])
        assert SAID in agent.tell("And without tools?")
        warm, turn = agent.calls[before:]
        assert [call.body.get("generate") for call in [*agent.calls[:2], warm, turn]] == [False, None] * 2
        prepared = json.loads(warm.answer)["response"]
        assert (prepared["output"], prepared["usage"]["output_tokens"]) == ([], 0)
        assert turn.body["previous_response_id"] == prepared["id"]
        assert [first.status, second.status, warm.status, turn.status] == [200] * 4


def test_codex_has_the_server_compact_a_thread(programs: Path, url: str, tmp_path: Path) -> None:
    """Codex asks a provider with the name OpenAI, and sends the compaction in the place of the answers before it."""
    with Relay(url) as relay:
        agent = codex(programs, relay, tmp_path)
        config = (tmp_path / "config.toml").read_text()
        config = config.replace('name = "quire"', 'name = "OpenAI"')
        (tmp_path / "config.toml").write_text(f"model_auto_compact_token_limit = 1000\n{config}")
        assert SAID in agent.tell(QUESTION)
        assert SAID in agent.tell("And now?", again=True)
        asked = [call.body["input"] for call in agent.calls]
        [at, *_] = [index for index, items in enumerate(asked) if items[-1]["type"] == "compaction_trigger"]
        assert "compaction" in {item["type"] for item in asked[-1]}
        assert len(asked) > at + 1
        assert set(read_calls(agent)) == {200}


def test_claude_code(programs: Path, url: str, tmp_path: Path) -> None:
    with Relay(url) as relay:
        agent = claude(programs, relay, tmp_path)
        assert SAID in agent.tell(QUESTION + " word" * (CONTEXT // 2))
        results = agent.calls[1].body["messages"][2]["content"]
        assert RESULT in json.dumps(results)
        assert SAID in agent.tell("And now?", again=True)
        assert set(read_calls(agent)) == {200}
        # A full context: the agent asks for a summary, and continues with it.
        before = len(agent.calls)
        assert SAID in agent.tell("word " * (CONTEXT // 2), again=True)
        refused, *more = agent.calls[before:]
        assert refused.status == 400
        assert re.search(r"prompt is too long: \d+ tokens > \d+ maximum", refused.answer)
        assert [call.status for call in more] == [200] * len(more)
        assert len(more) >= 2


def test_opencode(programs: Path, url: str, tmp_path: Path) -> None:
    with Relay(url) as relay:
        agent = opencode(programs, relay, tmp_path)
        assert SAID in agent.tell(QUESTION)
        assert any(RESULT in json.dumps(call.body["messages"]) for call in agent.calls)
        assert SAID in agent.tell("And now?", again=True)
        assert set(read_calls(agent)) == {200}
        # A full context: it knows the error, and asks for a summary.
        before = len(agent.calls)
        agent.tell("word " * CONTEXT, again=True)
        refused, summary, *_ = agent.calls[before:]
        assert refused.status == 400
        assert "summar" in json.dumps(summary.body["messages"][0])
        assert summary.status == 200

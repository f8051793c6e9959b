"""`quire chat`, and its calculator."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.cli.calculator import _PATTERN, CALCULATOR, MAX_LENGTH, CalculatorError, calculate, run_call
from tests.conftest import clean_environ

# --- chat -------------------------------------------------------------------------------------------------------------
# `quire chat` streams, remembers, stops on Ctrl-C, leaves on Ctrl-D, and reports each error in one line.


class Handler(BaseHTTPRequestHandler):
    """Echoes the last message word by word; some words make it misbehave."""

    server: FakeServer

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.authorization = self.headers["Authorization"]
        text = request["messages"][-1]["content"]
        tools = request.get("tool_choice") in ("auto", "required")
        if text == "full":
            self._json(429, {"error": {"message": "The queue is full."}}, {"Retry-After": "7"})
            return
        if text == "who":
            self._json(401, {"error": {"message": "Who are you?"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self._event({"choices": [{"delta": {"role": "assistant"}}]})
        self.wfile.write(b": keep-alive\n\n")
        if text.startswith("burst"):
            self.server.pause.wait(0.1)
        if tools and text.startswith("calculate "):
            self._call(text.removeprefix("calculate "))
            return
        if tools and self.server.keeps_calling:
            self._call("1 + 1")
            return
        for word in text.split():
            self._event({"choices": [{"delta": {"content": f"{word} "}}]})
        if text == "broken":
            self._event({"error": {"message": "The worker is gone."}})
            return
        if text == "cut":
            return
        if text == "endless":
            try:
                while True:
                    self.server.pause.wait(0.01)
                    self._event({"choices": [{"delta": {"content": "more "}}]})
            except OSError:
                self.server.client_gone.set()
                return
        self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"completion_tokens": 42}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _call(self, expression: str) -> None:
        """Streams a call of the calculator, in three pieces."""
        arguments = json.dumps({"expression": expression})
        first = {"id": f"call_{len(self.server.requests)}", "type": "function"}
        cut = expression == "cut"
        for delta in (
            {**first, "function": {"name": "calculate", "arguments": ""}},
            {"function": {"arguments": arguments[:9]}},
            {"function": {"arguments": arguments[9 : 12 if cut else None]}},
        ):
            self._event({"choices": [{"delta": {"tool_calls": [{"index": 0, **delta}]}}]})
        self._event({"choices": [{"delta": {}, "finish_reason": "length" if cut else "tool_calls"}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: Any) -> None:
        self.wfile.write(f"id: 1\ndata: {json.dumps(data)}\n\n".encode())

    def _json(self, status: int, data: Any, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = ["first", "second"]
        self.requests: list[dict[str, Any]] = []
        self.authorization: str | None = None
        self.pause = threading.Event()
        self.client_gone = threading.Event()
        self.keeps_calling = False
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "chat", *arguments]
    return subprocess.run(
        command, env=clean_environ(**environ), input=stdin, capture_output=True, text=True, timeout=30, check=False
    )


def test_a_prompt_is_answered_once(server: FakeServer) -> None:
    done = ask("one two three", "--url", server.url, "--temperature", "0", "--max-tokens", "9", "--system", "Be brief.")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "one two three", "")
    [request] = server.requests
    assert request["model"] == "first"
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two three"},
    ]
    assert (request["temperature"], request["max_tokens"], request["stream"]) == (0, 9, True)
    assert "top_p" not in request


def test_an_answer_as_json_has_the_conversation_and_its_times(server: FakeServer) -> None:
    done = ask("one two three", "--url", server.url, "--json")
    said = json.loads(done.stdout)
    assert said["messages"][1]["content"].strip() == "one two three"
    assert (said["model"], said["tokens"]) == ("first", 42)
    assert 0 < said["first_token_s"] <= said["total_s"]


def test_the_prompt_may_come_from_a_pipe_and_the_model_and_key_by_name(server: FakeServer) -> None:
    done = ask("--url", f"{server.url}/v1/", "--model", "second", stdin="from a pipe\n", QUIRE_CHAT_API_KEY="k")
    assert done.stdout.strip() == "from a pipe"
    assert server.requests[0]["model"] == "second"
    assert server.authorization == "Bearer k"
    assert ask("-", "--url", server.url, stdin="dash").stdout.strip() == "dash"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the locale selects the error handler
def test_a_pipe_that_is_no_utf8_is_one_line(server: FakeServer, errors: str) -> None:
    command = [sys.executable, "-m", "quire", "chat", "--url", server.url]
    environ = clean_environ(PYTHONIOENCODING=f"utf-8:{errors}")
    done = subprocess.run(command, env=environ, input=b"caf\xe9", capture_output=True, timeout=30, check=False)
    said = b"quire chat: standard input is not UTF-8; convert it, as with iconv -f latin1 -t utf-8\n"
    assert (done.returncode, done.stderr, server.requests) == (1, said, [])


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("full", "refused with 429: The queue is full; try again in 7 s"),
        ("who", "refused with 401: Who are you?; pass --api-key"),
        ("broken", "the answer broke off: The worker is gone."),
        ("cut", "the answer broke off: the server closed the connection"),
    ],
)
def test_a_failure_is_one_line(server: FakeServer, prompt: str, line: str) -> None:
    done = ask(prompt, "--url", server.url)
    assert done.returncode == 1
    [said] = done.stderr.splitlines()
    assert said.startswith("quire chat: ")
    assert line in said


def test_no_server_says_how_to_start_one() -> None:
    done = ask("hi", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr == (
        "quire chat: no server at http://127.0.0.1:9 (Connection refused); start one with `quire serve`, "
        "or pass --url\n"
    )


def test_a_server_without_a_model_and_an_empty_pipe(server: FakeServer) -> None:
    server.models = []
    assert "has no model yet" in ask("hi", "--url", server.url).stderr
    assert "standard input is empty" in ask("--url", server.url).stderr


def test_a_tool_call_is_run_and_its_result_sent_back(server: FakeServer) -> None:
    done = ask("calculate 17 * (23 - 4)", "--url", server.url, "--tools", "--tool-choice", "required")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        'tool call: calculate {"expression": "17 * (23 - 4)"}',
        "tool result: 323",
        "323 ",
    ]
    first, second = server.requests
    assert (first["tool_choice"], second["tool_choice"]) == ("required", "auto")
    assert [request["tools"][0]["function"]["name"] for request in server.requests] == ["calculate", "calculate"]
    question, call, result = second["messages"]
    assert question == {"role": "user", "content": "calculate 17 * (23 - 4)"}
    assert call["content"] is None
    assert call["tool_calls"] == [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "calculate", "arguments": '{"expression": "17 * (23 - 4)"}'},
        }
    ]
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "323"}


def test_an_error_of_the_calculator_goes_to_the_model(server: FakeServer) -> None:
    done = ask("calculate 1 / 0", "--url", server.url, "--tools")
    assert "tool result: error: division by zero" in done.stdout
    assert server.requests[0]["tool_choice"] == "auto"
    assert server.requests[1]["messages"][-1]["content"] == "error: division by zero"


def test_a_model_that_never_stops_calling_must_answer(server: FakeServer) -> None:
    server.keeps_calling = True
    done = ask("hello", "--url", server.url, "--tools", "--tool-choice", "required")
    assert done.stdout.splitlines() == ['tool call: calculate {"expression": "1 + 1"}', "tool result: 2"] * 4 + ["2 "]
    assert [request["tool_choice"] for request in server.requests] == ["required", "auto", "auto", "auto", "none"]


def test_a_tool_call_cut_at_the_token_limit_is_one_line(server: FakeServer) -> None:
    done = ask("calculate cut", "--url", server.url, "--tools", "--max-tokens", "5")
    assert (done.returncode, len(server.requests)) == (1, 1)
    assert done.stderr == "quire chat: a tool call was cut at the token limit; raise --max-tokens\n"


def test_without_the_flag_no_tools_are_sent(server: FakeServer) -> None:
    ask("hello", "--url", server.url)
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(server.requests[0])


def test_a_conversation_with_tools_is_saved(server: FakeServer, tmp_path: Path) -> None:
    terminal = Terminal("--url", server.url, "--tools", cwd=tmp_path)
    terminal.wait_for("> ")
    terminal.type("calculate 2 * 3\n")
    terminal.wait_for(r"tool result: 6\n6 \n.*\n> ")
    terminal.type("/save\n")
    terminal.wait_for(r"Saved 4 messages to chat\.md\n> ")
    assert '**assistant**\n\n`calculate {"expression": "2 * 3"}`' in (tmp_path / "chat.md").read_text()
    terminal.type("\x04")
    assert terminal.close() == 0


class Terminal:
    """`quire chat` in a pseudo-terminal: types input and waits for output."""

    def __init__(self, *arguments: str, cwd: Path, starter: Sequence[str] = (), **environ: str) -> None:
        self._controller, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [*starter, sys.executable, "-m", "quire", "chat", *arguments],
            env=clean_environ(TERM="xterm", XDG_STATE_HOME=str(cwd / "state"), **environ),
            cwd=cwd,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._raw = self._shown = self.output = ""

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = 60) -> str:
        """Return the output since the last call, up to and including the pattern, without colour codes."""
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self._shown)):
            ready, _, _ = select.select([self._controller], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self._shown!r}"
            data = os.read(self._controller, 4096).decode(errors="replace")
            self._raw, self.output = self._raw + data, self.output + data
            plain, rest = re.fullmatch(r"(.*?)(\x1b[\[?\d;]*)?", self._raw, re.DOTALL).groups()  # an escape may be cut
            self._shown += re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", plain).replace("\r", "")
            self._raw = rest or ""
        seen, self._shown = self._shown[: match.end()], self._shown[match.end() :]
        return seen

    def close(self) -> int:
        if self.process.poll() is None:
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        os.close(self._controller)
        return self.process.wait()


@pytest.mark.parametrize(("environ", "is_styled"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color_turns_off_grey_and_bold(
    server: FakeServer, tmp_path: Path, environ: dict[str, str], is_styled: bool
) -> None:
    terminal = Terminal("--url", server.url, cwd=tmp_path, **environ)
    terminal.wait_for(r"Ctrl-D leaves\.\n> ")
    terminal.type("hello\n")
    terminal.wait_for(r"42 tokens in .*\n> ")
    assert bool(re.search(r"\x1b\[\d*m", terminal.output)) is is_styled
    terminal.type("\x04")
    assert terminal.close() == 0


def test_a_conversation(server: FakeServer, tmp_path: Path) -> None:
    terminal = Terminal("--url", server.url, cwd=tmp_path)
    terminal.wait_for(r"first at http://.*Ctrl-D leaves\.\n> ")

    terminal.type("hello there\n")
    terminal.wait_for(r"hello there \n42 tokens in [\d.]+ s, first after \d+ ms, [\d.]+ tokens/s\n> ")
    terminal.type("again\n")
    terminal.wait_for(r"again \n42 tokens.*\n> ")
    roles = [message["role"] for message in server.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]

    terminal.type("/system Be kind.\n")
    terminal.wait_for(r"System message: Be kind\.\n> ")
    terminal.type("/save talk.json\n")
    terminal.wait_for(r"Saved 5 messages to talk\.json\n> ")
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][0] == {"role": "system", "content": "Be kind."}
    terminal.type("/save\n")
    terminal.wait_for(r"Saved 5 messages to chat\.md\n> ")
    assert "**user**\n\nhello there" in (tmp_path / "chat.md").read_text()

    terminal.type("/reset\n")
    terminal.wait_for(r"starts anew\.\n> ")
    terminal.type("once more\n")
    terminal.wait_for(r"once more \n42 tokens.*\n> ")
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["Be kind.", "once more"]

    terminal.type("/help\n")
    terminal.wait_for(r"Ctrl-C stops an answer, Ctrl-D leaves\.\n> ")
    terminal.type("/nonsense\n")
    terminal.wait_for(r"quire chat: there is no command /nonsense; /help lists them\n> ")
    terminal.type("full\n")
    terminal.wait_for(r"429: The queue is full.*\n> ")  # the conversation continues
    terminal.type("\x04")
    assert terminal.close() == 0


def test_a_burst_of_tokens_is_no_rate(server: FakeServer, tmp_path: Path) -> None:
    """All tokens arrive after a wait, within the same millisecond, so a rate would be meaningless."""
    terminal = Terminal("--url", server.url, cwd=tmp_path)
    terminal.wait_for("> ")
    terminal.type("burst of words\n")
    said = terminal.wait_for(r"42 tokens in [\d.]+ s, first after \d+ ms, [\d.]+ tokens/s\n> ")
    [rate] = re.findall(r"([\d.]+) tokens/s", said)
    assert float(rate) <= 42 / 0.1
    terminal.type("\x04")
    assert terminal.close() == 0


@pytest.mark.parametrize("trap", ["trap '' INT", "trap - INT"], ids=["ignored at first", "as ever"])
def test_ctrl_c_stops_an_answer_and_keeps_what_there_is(server: FakeServer, tmp_path: Path, trap: str) -> None:
    starter = ("sh", "-c", f'{trap}; exec "$@"', "-")
    terminal = Terminal("--url", server.url, cwd=tmp_path, starter=starter)
    terminal.wait_for("> ")
    terminal.type("endless\n")
    terminal.wait_for("more more ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(r"stopped, \d+ tokens in .*\n> ")
    assert server.client_gone.wait(60)  # the server sees the disconnection
    terminal.type("and now\n")
    terminal.wait_for(r"and now \n42 tokens.*\n> ")
    assert server.requests[-1]["messages"][1]["content"].startswith("endless more more ")
    # readline shows its prompt before it waits for keys. A signal between the two takes effect only with the next key.
    for _ in range(60):
        terminal.process.send_signal(signal.SIGINT)
        with suppress(AssertionError):
            terminal.wait_for(r"Ctrl-D leaves\.\n> ", 1)
            break
    else:
        pytest.fail("no hint")
    terminal.type("\x04")
    assert terminal.close() == 0


# --- calculator -------------------------------------------------------------------------------------------------------
# The calculator computes arithmetic exactly, and answers anything else with a reason.


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("10 - 4 - 3", "3"),
        ("12 / 4 / 3", "1"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333"),
        ("-1 / 3", "-0.333333333"),
        ("--5", "5"),
        ("2*-3", "-6"),
        ("-1 / 999999999999", "0"),
        (" 7 ", "7"),
    ],
)
def test_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "a number is missing"),
        ("1 +", "a number is missing"),
        ("* 2", "a number is missing"),
        ("1 2", "'2' is at a wrong place"),
        ("(1 + 2", "a parenthesis is not closed"),
        ("1)", "')' is at a wrong place"),
        ("1 / (2 - 2)", "division by zero"),
        ("2 ** 3", "a number is missing"),
        ("__import__('os')", "'_' is neither a number"),
        ("1e9", "'e' is neither a number"),
        ("٣ + 1", "'٣' is neither a number"),
        ("(" * 100 + "1" + ")" * 99, "nested more than 20 deep"),
        ("1" * (MAX_LENGTH + 1), "longer than 200 characters"),
    ],
)
def test_what_is_no_arithmetic_has_a_reason(expression: str, reason: str) -> None:
    with pytest.raises(CalculatorError, match=re.escape(reason)):
        calculate(expression)


def binary(sides: st.SearchStrategy[tuple[str, Fraction]]) -> st.SearchStrategy[tuple[str, Fraction]]:
    """Sums, differences and products of two expressions, in parentheses, with their values."""

    def join(left: tuple[str, Fraction], sign: str, right: tuple[str, Fraction]) -> tuple[str, Fraction]:
        (a, x), (b, y) = left, right
        return f"({a}{sign}{b})", {"+": x + y, "-": x - y, "*": x * y}[sign]

    return st.builds(join, sides, st.sampled_from("+-*"), sides)


numbers = st.integers(0, 999).map(lambda number: (str(number), Fraction(number)))


@given(st.recursive(numbers, binary, max_leaves=12))
def test_every_tree_of_operations_has_its_value(tree: tuple[str, Fraction]) -> None:
    text, value = tree
    assert calculate(text) == str(value)


@given(st.from_regex(_PATTERN, fullmatch=True, alphabet="0123456789.+-*/() "))
def test_every_expression_of_the_schema_can_be_read(expression: str) -> None:
    result = run_call("calculate", json.dumps({"expression": expression}))
    assert re.fullmatch(r"-?\d+(\.\d+)?|error: (division by zero|the expression is longer .*)", result)


@given(st.text())
def test_any_arguments_have_a_result(arguments: str) -> None:
    assert run_call("calculate", arguments).startswith("error: ")


@pytest.mark.parametrize("arguments", ["", "[" * 100_000, "[]", '{"expression": 5}', '{"expr": "1"}'])
def test_arguments_of_another_form_are_an_error(arguments: str) -> None:
    assert run_call("calculate", arguments) == 'error: the arguments must be like {"expression": "17 * 23"}'


def test_another_tool_is_an_error() -> None:
    assert run_call("eval", "{}") == "error: there is no tool 'eval'; the only tool is calculate"


@pytest.mark.parametrize("expression", ["*".join(["9" * 9] * 20), "-" * 199 + "1", "/".join(["7"] * 100)])
def test_the_longest_expressions_take_no_time(expression: str) -> None:
    started = time.thread_time()
    calculate(expression)
    assert time.thread_time() - started < 0.1


def test_the_tool_is_a_function_of_the_api() -> None:
    assert CALCULATOR["type"] == "function"
    assert CALCULATOR["function"]["name"] == "calculate"

"""`quire chat`: a conversation in the terminal, streamed, with any server that has the OpenAI API."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from quire.ops.cli.calculator import CALCULATOR, run_call
from quire.ops.cli.completions import ChatClient, Interrupted, StreamedAnswer
from quire.ops.cli.settings import ChatSettings
from quire.ops.paths import user_state_dir
from quire.ops.terminal import DIM, has_styles, styled
from quire.shared.config.command_line import CommandError
from quire.shared.process.interrupts import raise_at_ctrl_c

COMMANDS_HELP = """\
/reset          forget the conversation
/system [TEXT]  show or set the system message
/save [FILE]    write the conversation to a file: JSON if its name ends in .json, else Markdown
/help           show this
Ctrl-C stops an answer, Ctrl-D leaves."""
DEFAULT_FILE = "chat.md"
HISTORY_LENGTH = 1000
# After this number of rounds of tool calls the model must answer with text.
MAX_TOOL_ROUNDS = 4

Message = dict[str, Any]


def chat(settings: ChatSettings, environ: Mapping[str, str]) -> int:
    """Answer one prompt from the settings or a pipe, or else hold a conversation.

    Return the exit code. Raise CommandError.
    """
    raise_at_ctrl_c()
    client = ChatClient(settings.url, settings.api_key)
    prompt = settings.prompt
    if prompt == "-" or (not prompt and not sys.stdin.isatty()):
        prompt = _read_all(sys.stdin)
        if not prompt:
            raise CommandError("standard input is empty; give a prompt as an argument, or call it in a terminal")
    if settings.json and not prompt:
        raise CommandError("--json prints the answer to one prompt; give it as an argument, or through a pipe")
    conversation = ChatSession(client, settings)
    if settings.json:
        with contextlib.redirect_stdout(io.StringIO()):
            is_complete = conversation.ask(prompt)
        print(json.dumps(conversation.shown(), ensure_ascii=False, indent=1))
        return 0 if is_complete else 130
    if prompt:
        return 0 if conversation.ask(prompt) else 130
    _load_history(user_state_dir(environ) / "chat_history")
    return conversation.converse()


class ChatSession:
    """The messages of a conversation, and the handling of the lines that the user types."""

    def __init__(self, client: ChatClient, settings: ChatSettings) -> None:
        self._client = client
        self._model = settings.model or client.first_model()
        sampling = {name: getattr(settings, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._system = settings.system
        self._tools, self._tool_choice = settings.tools, settings.tool_choice
        self._messages: list[Message] = []
        self._answer = StreamedAnswer()

    def shown(self) -> dict[str, Any]:
        """Return the conversation, and measures of the last answer."""
        names = ("finish_reason", "tokens", "first_token_s", "total_s", "tokens_per_s")
        return {
            "model": self._model,
            "messages": self.messages,
            **{name: getattr(self._answer, name) for name in names},
        }

    @property
    def messages(self) -> list[Message]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return system + self._messages

    def converse(self) -> int:
        """Read lines and answer them until the end of input."""
        # SIGINT may be ignored: shells ignore it for commands that a script starts in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(dim(f"{self._model} at {self._client.url}. /help lists the commands, Ctrl-D leaves."))
        # \001 and \002 mark characters of zero width for readline.
        prompt = "\001\x1b[1m\002> \001\x1b[0m\002" if has_styles(sys.stdout) else "> "
        while True:
            try:
                line = input(prompt).strip()
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self.ask(line)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print(dim("\nCtrl-D leaves."))
            except CommandError as error:
                print(f"quire chat: {error}", file=sys.stderr)

    def ask(self, text: str) -> bool:
        """Stream the answer to `text`, run the tool calls in it, and keep all in the conversation.

        Return False if the user stopped the answer. Raise CommandError.
        """
        start = len(self._messages)
        self._messages.append({"role": "user", "content": text})
        answer, tool_round = StreamedAnswer(), 0
        try:
            stopped = self._stream(answer, tool_round)
            while answer.calls and not stopped:
                self._run_calls(answer)
                answer, tool_round = StreamedAnswer(), tool_round + 1
                stopped = self._stream(answer, tool_round)
        finally:
            if answer.text:
                self._messages.append({"role": "assistant", "content": answer.text})
            else:  # drop a question without an answer: the user will ask it again
                del self._messages[start:]
        self._answer = answer
        note = dim(_statistics(answer, stopped), sys.stderr)
        if sys.stderr.isatty() and note:
            print(note, file=sys.stderr)
        return not stopped

    def _stream(self, answer: StreamedAnswer, tool_round: int) -> bool:
        """Stream one answer to the terminal. Return whether the user stopped it. Raise CommandError."""
        request: dict[str, Any] = {"model": self._model, "messages": self.messages, **self._sampling}
        pieces = self._client.stream({**request, **self._tool_parameters(tool_round)}, answer)
        stopped, last_kind, calls = False, "", 0
        try:
            for kind, piece in pieces:
                begins_call = len(answer.calls) > calls
                calls = len(answer.calls)
                if last_kind and (begins_call or (last_kind == "call" and kind != "call")):
                    print()
                label = "tool call: " if begins_call else ""
                print(label + (dim(piece) if kind == "reasoning" else piece), end="", flush=True)
                last_kind = kind
        except KeyboardInterrupt:
            stopped = True
        except Interrupted:
            print()
            raise
        finally:
            pieces.close()
        print()
        return stopped

    def _tool_parameters(self, tool_round: int) -> dict[str, Any]:
        """Return the parameters of a request about tools. tool_round: the number of rounds of tool calls before it."""
        if not self._tools:
            return {}
        choice = self._tool_choice if tool_round == 0 else "auto" if tool_round < MAX_TOOL_ROUNDS else "none"
        return {"tools": [CALCULATOR], "tool_choice": choice, "parallel_tool_calls": False}

    def _run_calls(self, answer: StreamedAnswer) -> None:
        """Run the tool calls of an answer, and add calls and results to the conversation. Raise CommandError."""
        if answer.finish_reason == "length":
            raise CommandError("a tool call was cut at the token limit; raise --max-tokens")
        calls = [call.as_json() for call in answer.calls]
        self._messages.append({"role": "assistant", "content": answer.text or None, "tool_calls": calls})
        for call in answer.calls:
            result = run_call(call.name, call.arguments)
            print(f"tool result: {result}")
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/save": self._save,
            "/help": lambda _: print(dim(COMMANDS_HELP)),
        }
        if name not in commands:
            raise CommandError(f"there is no command {name}; /help lists them")
        commands[name](argument.strip())

    def _reset(self, _: str) -> None:
        self._messages.clear()
        print(dim("The conversation starts anew."))

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
        print(dim(f"System message: {self._system or 'none'}"))

    def _save(self, name: str) -> None:
        path = Path(name or DEFAULT_FILE).expanduser()
        if path.suffix == ".json":
            text = json.dumps({"model": self._model, "messages": self.messages}, ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n\n".join(f"**{message['role']}**\n\n{_shown(message)}" for message in self.messages) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror}; give another file") from error
        print(dim(f"Saved {len(self.messages)} messages to {path}"))


def _shown(message: Message) -> str:
    """Return the content of a message and its tool calls, as Markdown."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [f"`{function['name']} {function['arguments']}`" for function in functions]
    return "\n\n".join([*([message["content"]] if message["content"] else []), *calls])


def _read_all(stream: TextIO) -> str:
    try:
        text = stream.read().strip()
        text.encode()  # in some locales reading accepts bytes that are not UTF-8
    except UnicodeError as error:
        raise CommandError("standard input is not UTF-8; convert it, as with iconv -f latin1 -t utf-8") from error
    return text


def dim(text: str, stream: TextIO | None = None) -> str:
    """Return `text` in grey if the stream is a terminal. The default stream is standard output."""
    return styled(text, DIM, stream)


def _statistics(answer: StreamedAnswer, stopped: bool) -> str:
    parts = ["stopped"] if stopped else []
    if answer.first_token_s is not None:
        parts.append(f"{answer.tokens} tokens in {answer.total_s:.2f} s")
        parts.append(f"first after {answer.first_token_s * 1000:.0f} ms")
    if answer.tokens_per_s is not None:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.finish_reason == "length":
        parts.append("cut at the token limit (--max-tokens)")
    return ", ".join(parts)


def _load_history(path: Path) -> None:
    """Enable arrow keys and a persistent history, if Python has readline."""
    try:
        import readline
    except ImportError:
        return
    import atexit

    def save() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
        except OSError:
            pass  # losing the history is not worth an error

    with contextlib.suppress(OSError):  # no history exists yet
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LENGTH)
    atexit.register(save)

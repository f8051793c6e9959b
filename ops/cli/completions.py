"""A minimal client of the OpenAI chat API: lists the models, and streams one answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.ops.cli.server_url import parse_url, with_remedy
from quire.shared.config.command_line import CommandError

CONNECT_TIMEOUT_S = 10.0
# A server with a queue may send nothing for long before the first token, except keep-alive comments.
READ_TIMEOUT_S = 300.0


class Interrupted(CommandError):
    """The answer was cut off. The text so far has already been shown."""


@dataclass
class ToolCall:
    """A call of a tool. arguments: JSON text as the model wrote it."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the call in the form of the API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class StreamedAnswer:
    """One answer, filled while it streams. Times are in seconds since the request was sent."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the whole time, including the wait for the first token; None without a token.

        The time after the first token alone would be misleading: a proxy or a busy terminal delivers many at once.
        """
        if self.first_token_s is None or self.total_s <= 0:
            return None
        return self.tokens / self.total_s

    def add_call(self, delta: dict[str, Any]) -> str:
        """Add a piece of a tool call, and return its text to show. Raise Interrupted if it belongs to no call."""
        function = delta.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        index = delta.get("index", 0)
        if index == len(self.calls):
            self.calls.append(ToolCall(delta.get("id") or "", name))
        elif not self.calls or index != len(self.calls) - 1:
            raise Interrupted(f"the answer broke off: the server sent tool call {index} out of order")
        self.calls[-1].arguments += arguments
        return f"{name} {arguments}" if name else arguments


class ChatClient:
    """A client of one server. All errors are CommandErrors with the cause, the place and the remedy."""

    def __init__(self, url: str, api_key: str = "") -> None:
        server = parse_url(url)
        self._secure, self._host, self._port = server.secure, server.host, server.port
        self._path = server.path
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.url = server.shown

    def first_model(self) -> str:
        """Return the name of the server's first model."""
        connection = self._connect()
        try:
            response = self._request(connection, "GET", "/models", None)
            try:
                models = [str(model["id"]) for model in json.loads(response.read())["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise CommandError(
                    f"{self.url}{self._path}/models is no list of models; is it an OpenAI API?"
                ) from error
        finally:
            connection.close()
        if not models:
            raise CommandError(f"the server at {self.url} has no model yet; wait until a worker has started")
        return models[0]

    def stream(self, request: dict[str, Any], answer: StreamedAnswer) -> Generator[tuple[str, str], None, None]:
        """Send a chat completion. Yield (kind, text) as they arrive; the kind is `reasoning`, `content` or `call`.

        Closing the iterator closes the connection, which stops the answer on the server.
        """
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        started = time.monotonic()
        connection = self._connect()
        try:
            response = self._request(connection, "POST", "/chat/completions", json.dumps(body))
            usage = None
            for event in self._events(response):
                if error := event.get("error"):
                    raise Interrupted(f"the answer broke off: {_message(error)}")
                usage = event.get("usage") or usage
                for choice in event.get("choices", ())[:1]:
                    delta = choice.get("delta") or {}
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    answer.total_s = time.monotonic() - started
                    for kind, key in (("reasoning", "reasoning_content"), ("content", "content")):
                        if text := delta.get(key):
                            if answer.first_token_s is None:
                                answer.first_token_s = answer.total_s
                            answer.tokens += 1
                            if kind == "content":
                                answer.text += text
                            yield kind, text
                    for call in delta.get("tool_calls") or ():
                        if answer.first_token_s is None:
                            answer.first_token_s = answer.total_s
                        answer.tokens += 1
                        yield "call", answer.add_call(call)
            if usage:
                answer.tokens = usage.get("completion_tokens", answer.tokens)
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        cls = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = cls(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
        except OSError as error:
            remedy = "start one with `quire serve`, or pass --url"
            raise CommandError(f"no server at {self.url} ({error.strerror or error}); {remedy}") from error
        connection.sock.settimeout(READ_TIMEOUT_S)
        return connection

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            text = response.read(65536).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(
                f"{self.url} does not answer as an HTTP server ({_reason(error)}); check --url"
            ) from error
        raise CommandError(self._refusal(response, text))

    def _refusal(self, response: http.client.HTTPResponse, text: str) -> str:
        try:
            message = _message(json.loads(text)["error"])
        except (ValueError, KeyError, TypeError):
            message = text.strip()[:300] or response.reason
        remedy = ""
        if response.status in (401, 403):
            remedy = "pass --api-key"
        elif (wait := response.headers.get("Retry-After")) and "try again in" not in message.lower():
            remedy = f"try again in {wait} s"
        return f"{self.url} refused with {response.status}: {with_remedy(message, remedy)}"

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Yield the JSON of each server-sent event, up to `[DONE]`. Raise Interrupted if the stream ends before it."""
        try:
            for raw in response:
                line = raw.decode(errors="replace").rstrip("\r\n")
                if not line.startswith("data:"):
                    continue  # an id, a keep-alive comment, or the end of an event
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event, dict):
                    yield event
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Interrupted(f"the answer broke off: {_reason(error)}") from error
        raise Interrupted("the answer broke off: the server closed the connection")


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__

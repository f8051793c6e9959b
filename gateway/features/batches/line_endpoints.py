"""The endpoints whose calls a batch may have: how the body of a line is read, and how its answer is written.

A line is the same call as over HTTP, so everything is done by the parts of the API that answer HTTP requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quire.gateway.api.call import Call
from quire.gateway.api.chat import ChatDialect
from quire.gateway.api.chat_messages import read_messages
from quire.gateway.api.completions import CompletionDialect
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.parameters import CHAT, COMPLETIONS, read
from quire.gateway.serving.service import Gateway, Hold
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.call_metadata import CallMetadata, request_id
from quire.gateway.stream.transcript import Transcript


class LineEndpoint(Protocol):
    """One endpoint, for the lines of one owner at one model."""

    @property
    def name(self) -> str:
        """The name of the dialect, in the metadata of its calls."""
        ...

    def check(self, body: dict[str, Any]) -> None:
        """Check the parameters of a call without reading its prompt. Raises ApiError."""
        ...

    async def read(self, body: dict[str, Any], hold: Hold) -> Call:
        """Check and tokenize a call. hold: memory for its images. Raises ApiError."""
        ...

    def form_of(self, call: Call) -> object:
        """Return what `answer` needs of the call besides its metadata; None if that is nothing."""
        ...

    async def answer(self, call_id: str, buffer: OutputBuffer, transcript: Transcript, form: object) -> Iterable[str]:
        """Return the JSON of the answer in parts. form: of the call. Raises ApiError if the call failed."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a line: its JSON in parts, and the tokens that it used."""

    parts: Iterable[str]
    prompt_tokens: int
    completion_tokens: int


async def read_answer(
    endpoint: LineEndpoint, gateway: Gateway, call_id: str, metadata: CallMetadata, form: object
) -> Answer:
    """Read the answer of a call that has ended from its output logs. Raises ApiError if it failed."""
    ids = [request_id(call_id, index) for index in range(metadata.requests)]
    with gateway.listening(ids) as buffer:
        buffer.accept(None, is_logged=True)
        transcript = Transcript(metadata, gateway.model, buffer.cursors, is_joined=True)
        parts = await endpoint.answer(call_id, buffer, transcript, form)
        return Answer(parts, metadata.prompt_tokens, transcript.tokens)


class DialectLines:
    """Chats and completions."""

    def __init__(self, gateway: Gateway, owner: str, dialect: Dialect) -> None:
        self._gateway = gateway
        self._owner = owner
        self._dialect = dialect
        self.name = dialect.name

    def check(self, body: dict[str, Any]) -> None:
        if self.name == "chat":
            read(body, CHAT)
            read_messages(body["messages"])
        else:
            read(body, COMPLETIONS)

    async def read(self, body: dict[str, Any], hold: Hold) -> Call:
        return await self._dialect.read(body, self._gateway.limits, self._gateway.renderer_of(self._owner, hold))

    def form_of(self, call: Call) -> None:
        return None

    async def answer(self, call_id: str, buffer: OutputBuffer, transcript: Transcript, form: object) -> Iterable[str]:
        return await self._dialect.form(call_id, self._gateway.model, transcript.metadata).whole(buffer, transcript)


# Makes the endpoint for the lines of one owner at one model.
MakeEndpoint = Callable[[Gateway, str], LineEndpoint]


@dataclass(frozen=True, slots=True)
class LineEndpoints:
    """The endpoints at all paths of BATCH_ENDPOINTS. others: by path, those besides chats and completions."""

    others: Mapping[str, MakeEndpoint]

    def at(self, path: str, gateway: Gateway, owner: str) -> LineEndpoint:
        """Return the endpoint at a path, one of BATCH_ENDPOINTS."""
        match path:
            case "/v1/chat/completions":
                return DialectLines(gateway, owner, ChatDialect())
            case "/v1/completions":
                return DialectLines(gateway, owner, CompletionDialect())
        return self.others[path](gateway, owner)

"""The endpoints whose calls a batch may have: how the body of a line is read, and how its answer is written.

A line is the same call as over HTTP, so everything is done by the parts of the API that answer HTTP requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from quire.gateway.api.call import Call
from quire.gateway.api.chat import ChatDialect
from quire.gateway.api.chat_messages import read_messages
from quire.gateway.api.completions import CompletionDialect
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.embeddings import (
    EMBEDDINGS,
    EmbeddingCall,
    EmbeddingDialect,
    EmbeddingFormat,
    render_answer,
)
from quire.gateway.api.parameters import CHAT, COMPLETIONS, read
from quire.gateway.api.responses.dialect import ResponseDialect, StorageLimits
from quire.gateway.api.responses.request import read_request
from quire.gateway.api.responses.store import ResponseStore
from quire.gateway.serving import calls, embedding_calls
from quire.gateway.serving.service import Gateway
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

    async def read(self, body: dict[str, Any]) -> Call:
        """Check and tokenize a call. Raises ApiError."""
        ...

    async def answer(
        self, call_id: str, buffer: OutputBuffer, transcript: Transcript, form: EmbeddingFormat | None
    ) -> Iterable[str]:
        """Return the JSON of the answer in parts. Raises ApiError if the call failed."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a line: its JSON in parts, and the tokens that it used."""

    parts: Iterable[str]
    prompt_tokens: int
    completion_tokens: int


async def read_answer(
    endpoint: LineEndpoint, gateway: Gateway, call_id: str, metadata: CallMetadata, form: EmbeddingFormat | None
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

    def __init__(self, gateway: Gateway, dialect: Dialect) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self.name = dialect.name

    def check(self, body: dict[str, Any]) -> None:
        if self.name == "chat":
            read(body, CHAT)
            read_messages(body["messages"])
        else:
            read(body, COMPLETIONS)

    async def read(self, body: dict[str, Any]) -> Call:
        return await self._dialect.read(body, self._gateway.limits, self._gateway.renderer)

    async def answer(
        self, call_id: str, buffer: OutputBuffer, transcript: Transcript, form: EmbeddingFormat | None
    ) -> Iterable[str]:
        return await self._dialect.form(call_id, self._gateway.model, transcript.metadata).whole(buffer, transcript)


class EmbeddingLines:
    """Embeddings."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._dialect = EmbeddingDialect(gateway.model, gateway.settings.max_embedding_inputs)
        self.name = self._dialect.name

    def check(self, body: dict[str, Any]) -> None:
        read(body, EMBEDDINGS, unsupported={})

    async def read(self, body: dict[str, Any]) -> EmbeddingCall:
        return await self._dialect.read(body, self._gateway.limits, self._gateway.renderer)

    async def answer(
        self, call_id: str, buffer: OutputBuffer, transcript: Transcript, form: EmbeddingFormat | None
    ) -> Iterable[str]:
        assert form is not None, "an embedding call has a form"
        embeddings = await embedding_calls.collect(buffer, transcript, form, call_id)
        return render_answer(call_id, transcript.model_name, transcript.metadata, form, embeddings)


class ResponseLines:
    """Responses. They are not stored: the output file has them."""

    def __init__(self, gateway: Gateway, owner: str) -> None:
        self._gateway = gateway
        settings = gateway.settings
        limits = StorageLimits(settings.response_retention_s, settings.max_conversation_bytes)
        self._dialect = ResponseDialect(ResponseStore(calls.stored_calls(gateway, owner), gateway.model), limits)
        self.name = self._dialect.name

    def check(self, body: dict[str, Any]) -> None:
        read_request({**body, "store": False}, self._gateway.limits)

    async def read(self, body: dict[str, Any]) -> Call:
        return await self._dialect.read({**body, "store": False}, self._gateway.limits, self._gateway.renderer)

    async def answer(
        self, call_id: str, buffer: OutputBuffer, transcript: Transcript, form: EmbeddingFormat | None
    ) -> Iterable[str]:
        return await self._dialect.form(call_id, self._gateway.model, transcript.metadata).whole(buffer, transcript)


def line_endpoint(path: str, gateway: Gateway, owner: str) -> LineEndpoint:
    """Return the endpoint at a path, one of BATCH_ENDPOINTS."""
    match path:
        case "/v1/chat/completions":
            return DialectLines(gateway, ChatDialect())
        case "/v1/completions":
            return DialectLines(gateway, CompletionDialect())
        case "/v1/embeddings":
            return EmbeddingLines(gateway)
        case "/v1/responses":
            return ResponseLines(gateway, owner)
    raise ValueError(f"{path} is no endpoint of batches")

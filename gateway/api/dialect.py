"""The seam between the APIs and the verbs of a call, which `serving.calls` has once for all dialects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from multidict import CIMultiDictProxy

from quire.gateway.api import resume as stored
from quire.gateway.api.call import Call
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.resume import StoredCall
from quire.gateway.errors.api_errors import NotFound
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.transcript import Transcript
from quire.gateway.stream.writer import AnswerFormat, EventRenderer


class Dialect(ABC):
    """One of the APIs: how it reads calls, finds them again, and writes answers.

    name: in the metadata of its calls, in metrics and in logs. prefix: of the ids that clients see.
    """

    name: str
    prefix: str

    def check_headers(self, headers: CIMultiDictProxy[str]) -> Sequence[str]:
        """Check the headers that only this API has. Return those without effect. Raises InvalidRequest."""
        return ()

    @abstractmethod
    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        """Check and tokenize a call. Raises ApiError."""

    def form(self, call_id: str, model: ServedModel, metadata: CallMetadata) -> AnswerFormat:
        """Return the renderer of the answer to one call. A dialect without it writes its answers without the stream."""
        raise NotImplementedError(f"{self.name} has no answer of text")

    def events(
        self, call_id: str, model: ServedModel, transcript: Transcript, headers: Mapping[str, str], place: Any = None
    ) -> EventRenderer:
        """Return the renderer of the events after a place that `read_place` has read; None is the beginning."""
        form = self.form(call_id, model, transcript.metadata)
        return EventRenderer(transcript, form, headers, place)

    async def status(self, form: AnswerFormat, call_id: str, is_new: bool) -> str:
        """Return the JSON for a client that does not wait for its call. A dialect without it has no such calls."""
        raise NotImplementedError(f"{self.name} has no calls in the background")

    def is_kept(self, metadata: CallMetadata) -> bool:
        """Return True if clients may ask for the call after its own answer."""
        return True

    def not_found(self, public_id: str) -> NotFound:
        """Return the error for a call that is unknown, or of another dialect or owner."""
        return stored.not_found()

    def read_place(self, request: web.Request) -> Any:
        """Return the last event that the client of a resumed stream has. Raises InvalidRequest."""
        return stored.read_event_id(request)

    async def catch_up(
        self, buffer: OutputBuffer, transcript: Transcript, events: EventRenderer, place: Any, known: StoredCall
    ) -> tuple[str, int]:
        """Read the output log up to the place of the client.

        Return the events after it that were read, too, and the number of tokens that the client has. Raises
        InvalidRequest if the stream has no such place.
        """
        return await stored.catch_up(buffer, transcript, events, place, known), place.tokens

"""Stored responses: a response is a call, rendered again from its metadata and its output log.

The only thing that is stored besides is the conversation before the answer, flattened: the items of all previous
responses are in it, so that `previous_response_id` needs one read. It is compressed, because each response of a thread
has the whole thread, also what `truncation: auto` left out of the prompt.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from quire.gateway.api import resume
from quire.gateway.api.responses.body import PREFIX, ResponseBody, ResponseStatus, is_stored
from quire.gateway.api.responses.items import Item
from quire.gateway.api.responses.output_items import OutputItems
from quire.gateway.api.responses.tools import function_names
from quire.gateway.api.resume import StoredCall
from quire.gateway.errors.api_errors import ApiError, GenerationFailed, InvalidRequest, NotFound
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream.transcript import TextDelta, Transcript
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.messages import MessageError

T = TypeVar("T")

DIALECT = "response"
# Largest number of log entries per read.
PAGE = 128


class Retry(Protocol):
    """Retries a command to Redis (`admission.retry.RetryPolicy`)."""

    async def __call__(self, command: Callable[[], Awaitable[T]]) -> T: ...


def add_delta(output: OutputItems, delta: TextDelta) -> None:
    """Adds what the transcript made of one token, without making events."""
    changes = [*output.push(delta.parts or (), delta.logprobs), *output.push(delta.rest_parts)]
    if delta.finish_reason is not None:
        changes += output.finish(delta.finish_reason)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as Redis has it now. error: of a response that failed or was cancelled."""

    call_id: str
    call: StoredCall
    output: OutputItems
    transcript: Transcript
    error: ApiError | None

    @property
    def has_ended(self) -> bool:
        return self.transcript.ended or self.error is not None

    def json(self, model: ServedModel) -> str:
        """The Response object."""
        body = ResponseBody(self.call_id, model, self.call.metadata)
        if self.error is not None:
            self.output.fail()
            return body.failed(self.output, self.error)
        if self.transcript.ended:
            return body.ended(self.output, self.transcript.usage)
        status = ResponseStatus.QUEUED if self.call.is_queued else ResponseStatus.IN_PROGRESS
        return body.running(status, self.output)


class ResponseStore:
    """Reads the responses of one owner, which any gateway may have made."""

    def __init__(
        self,
        broker: Broker,
        retry: Retry,
        model: ServedModel,
        note_corrupt: Callable[[str, MessageError], None],
        owner: str = "",
    ) -> None:
        """note_corrupt: called with the id of a call whose metadata cannot be decoded. owner: of the responses."""
        self._broker = broker
        self._retry = retry
        self._model = model
        self._note_corrupt = note_corrupt
        self._owner = owner

    async def look_up(self, response_id: str) -> tuple[str, StoredCall]:
        """Returns the call of a stored response, and its id. Raises NotFound or BrokerDown."""
        try:
            call_id = resume.read_call_id(response_id, PREFIX)
        except NotFound:
            raise _not_found(response_id) from None
        try:
            call = await self._retry(partial(resume.look_up, self._broker, call_id, self._owner))
        except MessageError as error:
            self._note_corrupt(call_id, error)
            raise _not_found(response_id) from error
        if call is None or call.metadata.dialect != DIALECT or not is_stored(call.metadata):
            raise _not_found(response_id)
        return call_id, call

    async def read(self, response_id: str) -> StoredResponse:
        """Returns a stored response with its output so far. Raises NotFound or BrokerDown."""
        return await self.read_call(*await self.look_up(response_id))

    async def read_call(self, call_id: str, call: StoredCall) -> StoredResponse:
        """Returns the response of a call with its output so far. Raises BrokerDown."""
        transcript = Transcript(call.metadata, self._model, [call_id], is_joined=True)
        output = OutputItems(call_id, self._model.token_texts, function_names(call.metadata.echo))
        error: ApiError | None = None
        try:
            while not transcript.ended:
                found = await self._retry(partial(self._broker.read_output, call_id, transcript.tokens, PAGE))
                for item in found:
                    for delta in transcript.feed(item):
                        add_delta(output, delta)
                if not found:
                    break
        except (MessageError, KeyError):
            error = GenerationFailed("The output log of the response is corrupt.")
        if error is None and call.is_done and not transcript.ended:
            error = GenerationFailed("The end of the response was lost together with data of Redis.")
        return StoredResponse(call_id, call, output, transcript, error or transcript.error)

    async def conversation(self, call_id: str) -> list[Item]:
        """Returns the items before the answer of a stored response. Raises NotFound or BrokerDown."""
        found: Any = await self._retry(partial(self._broker.client.get, self._broker.keys.conversation(call_id)))
        if found is None:
            raise _not_found(PREFIX + call_id)
        items: list[Item] = json.loads(await asyncio.to_thread(zlib.decompress, found))
        return items

    async def whole_conversation(self, response_id: str) -> list[Item]:
        """Returns the items before the answer of a stored response, and its output.

        Raises InvalidRequest for the parameter `previous_response_id`, or BrokerDown.
        """
        try:
            response = await self.read(response_id)
            items = await self.conversation(response.call_id)
        except NotFound:
            raise InvalidRequest(
                f"Previous response with id {response_id[:80]!r} not found. It may have expired, or was made with "
                "store: false.",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None
        if not response.has_ended:
            raise InvalidRequest(
                f"The previous response {response_id!r} has not ended; wait for its end, or cancel it.",
                param="previous_response_id",
                code="previous_response_in_progress",
            )
        return items + output_of(response)


async def packed(conversation: bytes) -> bytes:
    """The JSON of a conversation as `ResponseStore.conversation` reads it."""
    return await asyncio.to_thread(zlib.compress, conversation, 1)


def output_of(response: StoredResponse) -> list[Item]:
    """The output items in the form of input items."""
    items: list[Item] = json.loads(response.output.json())
    return items


def _not_found(response_id: str) -> NotFound:
    """The error hides whether the response ever existed."""
    return NotFound(f"Response with id {response_id[:80]!r} not found.", param="response_id")

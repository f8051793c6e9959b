"""Stored responses: a response is a call, rendered again from its metadata and its output log.

The only thing that is stored besides is the conversation before the answer, flattened: the items of all previous
responses are in it, so that `previous_response_id` needs one read. It is compressed, because each response of a thread
has the whole thread, also what `truncation: auto` left out of the prompt.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.gateway.api.responses.body import PREFIX, ResponseBody, ResponseStatus, is_stored, split_echo
from quire.gateway.api.responses.images import digests_of, set_images
from quire.gateway.api.responses.items import Item
from quire.gateway.api.responses.output_items import OutputItems
from quire.gateway.api.responses.tools import function_names
from quire.gateway.api.resume import StoredCall, StoredCalls, read_call_id
from quire.gateway.errors.api_errors import ApiError, GenerationFailed, InvalidRequest, NotFound
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream.transcript import Transcript
from quire.shared.protocol.keys import image_name
from quire.shared.protocol.messages import GenerationRequest, MessageError

DIALECT = "response"
# Largest number of log entries per read.
PAGE = 128


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
        """Return the Response object."""
        body = ResponseBody(self.call_id, model, self.call.metadata)
        if not self.transcript.is_exact:
            body.mark()
        if self.error is not None:
            self.output.fail()
            return body.failed(self.output, self.error)
        if self.transcript.ended:
            return body.ended(self.output, self.transcript.usage)
        status = ResponseStatus.QUEUED if self.call.is_queued else ResponseStatus.IN_PROGRESS
        return body.running(status, self.output)


class ResponseStore:
    """Reads the responses of one owner, which any gateway may have made."""

    def __init__(self, calls: StoredCalls, model: ServedModel) -> None:
        self._calls = calls
        self._broker, self._retry = calls.broker, calls.retry
        self._model = model

    async def look_up(self, response_id: str) -> tuple[str, StoredCall]:
        """Return the call of a stored response, and its id. Raises NotFound or BrokerDown."""
        call_id = read_call_id(response_id, PREFIX)
        call = await self._calls.look_up(call_id, DIALECT) if call_id else None
        if call is None or not is_stored(call.metadata):
            raise not_found(response_id)
        return call_id, call

    async def read(self, response_id: str) -> StoredResponse:
        """Return a stored response with its output so far. Raises NotFound or BrokerDown."""
        return await self.read_call(*await self.look_up(response_id))

    async def json(self, response_id: str) -> str:
        """Return a stored response as it is now. Raises NotFound or BrokerDown."""
        return (await self.read(response_id)).json(self._model)

    async def read_call(self, call_id: str, call: StoredCall) -> StoredResponse:
        """Return the response of a call with its output so far. Raises BrokerDown."""
        transcript = Transcript(call.metadata, self._model, [call_id], is_joined=True)
        fields, compaction = split_echo(call.metadata.echo)
        output = OutputItems(call_id, self._model.token_texts, function_names(fields), compaction)
        error: ApiError | None = None
        try:
            while not transcript.ended:
                page = await self._retry(partial(self._broker.read_output, call_id, transcript.tokens, PAGE))
                for item in page:
                    for delta in transcript.feed(item):
                        output.add(delta)
                if not page:
                    break
        except (MessageError, KeyError):
            error = GenerationFailed("The output log of the response is corrupt.")
        if error is None and call.is_done and not transcript.ended:
            error = GenerationFailed("The end of the response was lost together with data of Redis.")
        return StoredResponse(call_id, call, output, transcript, error or transcript.error)

    async def conversation(self, call_id: str) -> list[Item]:
        """Return the items before the answer of a stored response. Raises NotFound or BrokerDown."""
        compressed: Any = await self._retry(partial(self._broker.client.get, self._broker.keys.conversation(call_id)))
        if compressed is None:
            raise not_found(PREFIX + call_id)
        items: list[Item] = json.loads(await asyncio.to_thread(zlib.decompress, compressed))
        return items

    async def files(self, call_id: str, digests: Iterable[str]) -> dict[str, bytes]:
        """Return files of the images of a stored response by digest. Raises NotFound or BrokerDown."""
        wanted = list(digests)
        found = await self.files_within(await self.scope(call_id), wanted) if wanted else {}
        if found is None:
            raise not_found(PREFIX + call_id)
        return found

    async def scope(self, call_id: str) -> str:
        """Return the tenant within which a stored response shares images. Raises NotFound or BrokerDown."""
        keys = self._broker.keys
        try:
            body: Any = await self._retry(partial(self._broker.client.hget, keys.request(call_id), "body"))
            return GenerationRequest.decode(body or b"").cache_scope
        except MessageError:
            raise not_found(PREFIX + call_id) from None

    async def files_within(self, scope: str, digests: Iterable[str]) -> dict[str, bytes] | None:
        """Return the files of a tenant by digest; None if Redis lacks one. Raises BrokerDown."""
        if not (wanted := list(dict.fromkeys(digests))):
            return {}
        names = [self._broker.keys.image(image_name(scope, digest)) for digest in wanted]
        files: Any = await self._retry(partial(self._broker.client.mget, names))
        return None if None in files else dict(zip(wanted, files, strict=True))

    async def whole_conversation(self, response_id: str) -> list[Item]:
        """Return the items before the answer of a stored response, and its output. The images have no files yet.

        Raises InvalidRequest for the parameter `previous_response_id`, or BrokerDown.
        """
        with _previous(response_id):
            response = await self.read(response_id)
            items = await self.conversation(response.call_id)
        if not response.has_ended:
            raise InvalidRequest(
                f"The previous response {response_id!r} has not ended; wait for its end, or cancel it.",
                param="previous_response_id",
                code="previous_response_in_progress",
            )
        return items + output_of(response)

    async def load_images(self, response_id: str, items: Sequence[Item]) -> None:
        """Give the images of a conversation their files. Raises as `whole_conversation`."""
        with _previous(response_id):
            set_images(items, await self.files(read_call_id(response_id, PREFIX) or "", digests_of(items)))


@contextmanager
def _previous(response_id: str) -> Iterator[None]:
    """Turn NotFound into the error of the parameter `previous_response_id`."""
    try:
        yield
    except NotFound:
        raise InvalidRequest(
            f"Previous response with id {response_id[:80]!r} not found. It may have expired, or was made with "
            "store: false.",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from None


async def packed(conversation: bytes) -> bytes:
    """Return the JSON of a conversation as `ResponseStore.conversation` reads it."""
    return await asyncio.to_thread(zlib.compress, conversation, 1)


def item_place(item_id: str) -> tuple[str, int] | None:
    """Return the call and the index that the id of an output item stands for; None if it is no such id."""
    _, separator, rest = item_id.partition("_")
    call_id, _, index = rest.rpartition("_")
    if not separator or not call_id or not index.isascii() or not index.isdigit() or len(index) > 6:
        return None
    return call_id, int(index)


def output_of(response: StoredResponse) -> list[Item]:
    """Return the output items in the form of input items."""
    items: list[Item] = json.loads(response.output.json())
    return items


def not_found(response_id: str) -> NotFound:
    """Return the error for an unknown response. The error hides whether the response ever existed."""
    return NotFound(f"Response with id {response_id[:80]!r} not found.", param="response_id")

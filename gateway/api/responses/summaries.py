"""Summaries that take the place of items: the call that asks for one, and what becomes of its answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quire.gateway.api.call import Call
from quire.gateway.api.conversation import read_call
from quire.gateway.api.parameters import read
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.responses.body import PREFIX, joined_echo, usage_of
from quire.gateway.api.responses.compaction import (
    ASK,
    CARRIED,
    COMPACTION,
    KEEPS,
    REPLACES,
    SUMMARY_TOKENS,
    Compaction,
)
from quire.gateway.api.responses.events import ResponseEvents
from quire.gateway.api.responses.images import given_items
from quire.gateway.api.responses.items import (
    Item,
    divided,
    droppable,
    kept_by_compaction,
    summary_message,
    user_message,
    without_oldest,
)
from quire.gateway.api.responses.output_items import ItemType
from quire.gateway.api.responses.parameters import COMPACT, UNUSED
from quire.gateway.api.responses.request import ResponseRequest, read_request
from quire.gateway.errors.api_errors import GenerationFailed, InvalidRequest, refused
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.call_metadata import MAX_ECHO_LENGTH
from quire.gateway.stream.transcript import Transcript
from quire.gateway.stream.writer import deltas

# Runs the call that asks for a summary, and returns the text of its answer. Raises ApiError.
Summarise = Callable[[Call], Awaitable[str]]


async def summary_text(call_id: str, model: ServedModel, buffer: OutputBuffer, transcript: Transcript) -> str:
    """Return the text of an answer at its end, without its reasoning. Raises ApiError, also if the answer has none."""
    output = ResponseEvents(call_id, model, transcript.metadata).output
    async for delta in deltas(buffer, transcript):
        output.add(delta)
    if not (text := "".join(item.text for item in output.items if item.type == ItemType.MESSAGE).strip()):
        raise GenerationFailed("The model has written no summary. Send the call again, or compact fewer items.")
    return text


def compacted_response(call_id: str, items: Sequence[Item], summary: str, transcript: Transcript) -> str:
    """Return the answer of /v1/responses/compact as JSON: messages that are not the assistant's, and the summary."""
    kept = given_items([item for item in items if item.get("role") in ("user", "system", "developer")])
    compaction = {"id": f"cmp_{call_id}", "type": COMPACTION, "encrypted_content": Compaction(summary).encode()}
    answer = {
        "id": PREFIX + call_id,
        "object": "response.compaction",
        "created_at": transcript.metadata.created,
        "output": [*kept, compaction],
        "usage": usage_of(transcript.usage),
    }
    return json.dumps(answer)


async def compacting_call(
    request: ResponseRequest, items: Sequence[Item], limits: RequestLimits, renderer: Renderer, echo: str
) -> Call:
    """Return the call of an input that ends with `compaction_trigger`. Raises ApiError.

    A client that sends its items keeps what it wants of them; a conversation of this server goes on with the summary.
    """
    if not items:
        raise refused("input", "input is empty: there is nothing to compact.")
    echo = joined_echo(echo, REPLACES if request.previous or request.conversation_id else KEEPS)
    asked = [*items, user_message(ASK)]
    return await fitting_call(request.for_summary(), asked, limits, renderer, echo, SUMMARY_TOKENS)


def read_compact_request(body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> ResponseRequest:
    """Read a body of /v1/responses/compact. Raises InvalidRequest."""
    read(body, COMPACT)
    return read_request({**body, "store": False}, limits, renderer.model.template)


async def compacted_call(
    summarise: Summarise,
    body: Mapping[str, Any],
    request: ResponseRequest,
    items: Sequence[Item],
    limits: RequestLimits,
    renderer: Renderer,
    call: Call,
) -> Call:
    """Return a call with a summary in place of the items before its last step; the call itself without such items.

    Raises ApiError.
    """
    head, older, step = divided(items)
    if not older:
        return call
    summary = await summarise(await read_summary(body, [*head, *older], limits, renderer))
    content = Compaction(summary, kept_by_compaction(step)).encode()
    echo = joined_echo(call.about.echo, content)
    if len(echo) > MAX_ECHO_LENGTH:
        raise refused(
            "context_management",
            f"context_management keeps the last step, with which the compaction has {len(content)} characters, "
            f"and at most {MAX_ECHO_LENGTH} are allowed with the fields of the call.",
        )
    # The model sees the images of the last step this time.
    return await fitting_call(request, [*head, summary_message(summary), *step], limits, renderer, echo)


async def read_summary(
    body: Mapping[str, Any],
    items: Sequence[Item],
    limits: RequestLimits,
    renderer: Renderer,
    no_effect: Sequence[str] = (),
) -> Call:
    """Return the call that asks the model for a summary of items, whose images were read. Raises ApiError.

    body: of the call that needs the summary, which has the same model, instructions and labels. no_effect: names of its
    parameters without an effect, besides those for which a summary has no use.
    """
    carried = {name: body[name] for name in CARRIED if name in body}
    request = read_request({**carried, "input": ASK, "store": False}, limits, renderer.model.template)
    request.call.check(limits)
    call = await fitting_call(
        request, [*items, *request.items], limits, renderer, request.echo(), default_max_tokens=SUMMARY_TOKENS
    )
    unused = [name for name in UNUSED if body.get(name) not in (None, [])]
    return call.without_effect([*dict.fromkeys((*no_effect, *unused))])


async def fitting_call(
    request: ResponseRequest,
    items: Sequence[Item],
    limits: RequestLimits,
    renderer: Renderer,
    echo: str,
    default_max_tokens: int | None = None,
) -> Call:
    """Return the call with all items, or, with `truncation: auto`, without the oldest ones that do not fit."""
    read_items = partial(
        read_call,
        call=request.call,
        limits=limits,
        renderer=renderer,
        echo=echo,
        default_max_tokens=default_max_tokens,
    )
    try:
        return await read_items(request.conversation(items))
    except InvalidRequest as error:
        if error.code != "context_length_exceeded" or not request.is_truncated:
            raise
        refusal = error
    # The smallest number of dropped items that is enough; fewer tries than there are bits in the number of items.
    low, high = 1, droppable(items)
    call: Call | None = None
    while low <= high:
        count = (low + high) // 2
        try:
            call = await read_items(request.conversation(without_oldest(items, count)))
            high = count - 1
        except InvalidRequest as error:
            if error.code != "context_length_exceeded":
                raise
            low = count + 1
    if call is None:
        raise refusal
    return call

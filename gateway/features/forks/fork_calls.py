"""POST .../{id}/fork: a new call that continues the answer of another one at any token, while that one runs on.

POST /v1/responses with `at` forks the previous response.

Prompt, parameters and tokens of the first call are read from Redis, so it may run at any worker or have ended. Its
worker shares the blocks of what it has computed; any other worker computes the kept tokens as part of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web

from quire.gateway.api.call import Call
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.parameters import read
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.resume import StoredCall
from quire.gateway.errors.api_errors import InvalidRequest, NotFound, refused
from quire.gateway.features.forks.fork_parameters import BODIES, FORKS, INHERITED, OF_CREATION, PREVIOUS, SAMPLING
from quire.gateway.model.renderer import Renderer
from quire.gateway.output.parts import PartKind, is_complete, merged
from quire.gateway.output.tools import Besides
from quire.gateway.serving.calls import find, serve
from quire.gateway.serving.service import Gateway
from quire.gateway.stream.call_metadata import CallMetadata, request_id
from quire.gateway.stream.sse import EventId
from quire.shared.protocol.messages import Delta, GenerationRequest, MessageError, SamplingParams
from quire.shared.protocol.sampling_params import Parameter
from quire.shared.protocol.states import OutcomeName

__all__ = ["BODIES", "create_response", "fork"]


async def fork(dialect: Dialect, gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """POST .../{id}/fork: continues an answer of the caller with other parameters, or after another text."""
    call_id, known = await find(dialect, gateway, request)
    return await serve(dialect, gateway, request, _Fork(gateway, dialect.prefix + call_id, call_id, known).read)


async def create_response(dialect: Dialect, gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """POST /v1/responses: generates a response; with `at` it forks the previous one."""

    async def read_either(body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        if body.get("at") is None:
            return await dialect.read(body, limits, renderer)
        given = {name: value for name, value in body.items() if value is not None}
        previous = _read(given, PREVIOUS)["previous_response_id"]
        try:
            call_id, known = await find(dialect, gateway, request, previous)
        except NotFound:
            raise refused(
                "previous_response_id",
                f"Previous response with id {previous[:80]!r} not found. It may have expired, or is not stored.",
                code="previous_response_not_found",
            ) from None
        return await _Fork(gateway, dialect.prefix + call_id, call_id, known, PREVIOUS).read(given, limits, renderer)

    return await serve(dialect, gateway, request, read_either)


def _read(body: Mapping[str, Any], table: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the parameters of a fork. Raises InvalidRequest, with a remedy for those that no fork has."""
    if unknown := next((name for name in body if name not in table), None):
        name = unknown[:80]
        raise refused(
            name,
            f"{name!r} is not a parameter of a fork, which follows the call that it continues in all that it cannot "
            "set; leave it out.",
            code="unknown_parameter",
        )
    return read(body, table)


@dataclass(frozen=True, slots=True)
class _Origin:
    """A request that is forked, and the tokens of one of its choices that the log has.

    deltas: of all choices, each with the choice, in the order of the log.
    """

    request: GenerationRequest
    choice: int
    deltas: list[Delta]

    def kept(self, place: int | EventId | None) -> tuple[int, ...]:
        """Return the tokens of the choice up to a place; None is the end. Raises InvalidRequest."""
        tokens: list[int] = []
        passed, count, most = 0, None, None
        for delta in self.deltas:
            if isinstance(place, EventId) and count is None and passed + len(delta.token_ids) >= place.tokens:
                inside = place.tokens - passed if delta.choice == self.choice else 0
                count = len(tokens) + inside
            passed += len(delta.token_ids)
            if delta.choice == self.choice:
                tokens += delta.token_ids
                if delta.finish_reason == OutcomeName.STOP and not delta.matched_stop:
                    most = len(tokens) - 1  # nothing follows an end token
        most = len(tokens) if most is None else most
        if not isinstance(place, EventId):
            count = most if place is None else place
        elif count is not None:
            count = min(count, most)  # the last events follow the end token
        if count is None or count > most:
            end = ", without its end token" if most < len(tokens) else ""
            raise refused(
                "at",
                f"at is {place}, and the answer has {most} tokens so far{end}. Keep at most these.",
                code="no_such_token",
            )
        return tuple(tokens[:count])


class _Fork:
    """A new call that continues a call of a dialect."""

    def __init__(
        self,
        gateway: Gateway,
        public_id: str,
        call_id: str,
        known: StoredCall,
        table: Mapping[str, Parameter] | None = None,
    ) -> None:
        """table: its parameters; by default those of the dialect's forks."""
        self._gateway = gateway
        self._table = FORKS[known.metadata.dialect] if table is None else table
        self._public_id, self._call_id, self._known = public_id, call_id, known

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> Call:
        """Check the parameters, and make the prompt of the prompt and the tokens that are kept. Raises ApiError."""
        given, about = _read(body, self._table), self._known.metadata
        if model := given.get("model", ""):
            limits.check_model(model)
            if (model if model in limits.adapters else "") != about.adapter:
                raise refused("model", "model is not that of the previous response; leave it out.")
        name = "max_output_tokens" if about.dialect == "response" else "max_tokens"
        renamed = {"max_tokens": given[name]} if name in given else {}
        asked = {name: value for name, value in given.items() if name not in OF_CREATION}
        call = Call.of({**asked, **renamed, "model": about.adapter or self._gateway.model.name}, {})
        call.check(limits)
        if isinstance(given.get("at"), EventId) and about.requests > 1:
            raise refused(
                "at", "at must be a number of tokens, because the prompts of the call share the ids of events."
            )
        origin = await self._origin(given.get("choice", 0))
        first = origin.request
        kept = origin.kept(given.get("at"))
        # A fork of a fork: the prompt ends with tokens that count as output.
        before = first.prompt[len(first.prompt) - first.num_kept :]
        for text in ("continuation", "input"):
            if given.get(text):
                kept += tuple(await renderer.prompt(text, given[text], limits.max_model_len, False))
                if first.sampling.grammar:
                    await renderer.check_follows(first.sampling.grammar, [*before, *kept], text)
        left = first.sampling.max_tokens - len(kept)
        if call.max_tokens is None and left < 1:
            raise refused(
                name,
                f"the first call had {name} {first.sampling.max_tokens}, and {len(kept)} tokens are kept; give {name}.",
            )
        files = await self._gateway.retry(partial(self._gateway.broker.images, first))
        if files is None:
            raise InvalidRequest(
                "An image of the call is not kept any more. Send a new call instead.",
                param="id",
                code="prompt_not_kept",
            )
        common = _sampling(first.sampling, call.common, given, len(kept))
        call = replace(
            call,
            common=common,
            seed=given.get("seed", first.sampling.seed),
            about=replace(
                call.about,
                stop=given.get("stop", about.stop),
                include_stop_str_in_output=common.include_stop_str_in_output,
                skip_special_tokens=about.skip_special_tokens,
                continues_message=True,
            ),
            cache_salt=first.cache_salt,
            forked_from=first.id,
            num_kept=len(before) + len(kept),
            first_choice=first.first_choice + origin.choice,
            images=first.images,
            files=files,
        )
        spec = _output_spec(about, renderer, kept)
        echo = self._echo(call, given) if about.echo else ""
        return call.with_prompts([("at", [*first.prompt, *kept])], limits, left, spec, echo)

    def _echo(self, call: Call, given: Mapping[str, Any]) -> str:
        """Return the fields of a response that repeat the call, as JSON. A fork is not stored."""
        sampling, about = call.common, call.about
        fields = json.loads(self._known.metadata.echo.partition("\n")[0]) | {
            "background": False,
            "conversation": None,
            "frequency_penalty": sampling.frequency_penalty,
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": dict(about.metadata),
            "presence_penalty": sampling.presence_penalty,
            "previous_response_id": self._public_id,
            "service_tier": about.service_tier or "default",
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        return json.dumps(fields | {name: given.get(name) for name in ("safety_identifier", "user")})

    async def _origin(self, choice: int) -> _Origin:
        """Read the request of a choice, and its tokens so far. Raises InvalidRequest or BrokerDown."""
        about, broker = self._known.metadata, self._gateway.broker
        if choice >= about.choices:
            raise refused("choice", f"choice is {choice}, and the call has {about.choices} choices, from 0.")
        name = request_id(self._call_id, choice // about.n)
        try:
            body: Any = await self._gateway.retry(partial(broker.client.hget, broker.keys.request(name), "body"))
            items = await self._gateway.retry(partial(broker.read_output, name))
            if body is None:
                raise InvalidRequest(
                    "The call has ended, and its prompt is not kept: prompts of 64 KiB (about 16,000 tokens) and more "
                    "are kept only for stored responses. Send a new call instead.",
                    param="id",
                    code="prompt_not_kept",
                )
            request = GenerationRequest.decode(body)
        except MessageError as error:
            raise InvalidRequest(
                "The call is of another version of this server, and cannot be forked.", param="id", code="not_forkable"
            ) from error
        return _Origin(request, choice % about.n, [delta for item in items for delta in item.deltas])


def _sampling(first: SamplingParams, own: SamplingParams, given: Mapping[str, Any], kept: int) -> SamplingParams:
    """Return the sampling parameters of a fork: those of the first call, and those that it gives itself.

    Raises InvalidRequest.
    """
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
        if first.grammar and given.get(name):
            raise refused(
                name, f"{name} is not supported here: the answer follows a grammar, which says where it ends."
            )
    return replace(
        own,
        **{name: getattr(first, name) for name in SAMPLING if name not in given}
        | ({} if "min_tokens" in given else {"min_tokens": max(0, first.min_tokens - kept)}),
        **{name: getattr(first, name) for name in INHERITED},
    )


def _output_spec(about: CallMetadata, renderer: Renderer, kept: tuple[int, ...]) -> str:
    """Return how the rest of an answer is read after the tokens that are kept. Raises InvalidRequest."""
    spec = about.output()
    if spec is None or not kept:
        return about.output_spec
    text: str = renderer.model.tokenizer.decode(list(kept), skip_special_tokens=about.skip_special_tokens)
    if (reasoning := spec.reasoning) is not None:
        markers = reasoning.format
        begins = reasoning.starts_inside or text.lstrip().startswith(markers.start)
        if begins and markers.end not in text:
            return replace(spec, starts_in_reasoning=True).encode()
    if spec.tool_format:
        parser = spec.parser()
        parts = merged(parser.push(text))
        # Outside of calls and markers, a letter is content.
        probe = merged(parser.push("x"))
        is_outside = len(probe) == 1 and probe[0].kind is PartKind.CONTENT and probe[0].text.strip() == "x"
        # An answer that is nothing but calls has no text after them.
        ends_with_call = bool(parts) and parts[-1].kind is PartKind.ARGUMENTS and is_complete(parts[-1].text)
        if not is_outside and (spec.besides is Besides.TEXT or not ends_with_call):
            raise refused(
                "at", "at is inside a tool call; keep the tokens before it, or all of it.", code="inside_tool_call"
            )
    return replace(spec, reasoning_format="", starts_in_reasoning=False).encode()

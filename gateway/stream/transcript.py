"""The text of a call, from step items: a detokenizer and a stop-string filter per choice, and the token counts of
`usage`.

A call with tools, with reasoning, or of a dialect with typed events also has a parser per choice. Such a call is read
token by token, so that its parts, and the events made of them, depend on the tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from quire.gateway.errors import api_errors
from quire.gateway.model.served_model import ServedModel
from quire.gateway.output.parts import AnswerPart
from quire.gateway.stream.buffer import (
    ClosedOutcome,
    NotLoadedOutcome,
    NoWorkerOutcome,
    ParkedOutcome,
    RevokedOutcome,
)
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.choice_parts import ChoiceParts
from quire.gateway.stream.choice_text import ChoiceText, ScoredTokens
from quire.gateway.stream.prompt_text import PromptText
from quire.shared.protocol.messages import BY_TOKEN, Delta, Outcome, PromptReport, StepItem
from quire.shared.protocol.states import COMPLETE, OutcomeName

# The finish reason of a choice that ended after tool calls. A choice that ended inside a call keeps its own reason.
TOOL_CALLS = "tool_calls"

# Retry-After of a call that no worker took: the time in which a worker with a small model starts.
NO_WORKER_RETRY_S = 10

PARKED_MESSAGE = (
    "The call is parked: its answer waits with its tokens. POST .../{id}/unpark continues it; then resume its stream."
)


class TextDelta(NamedTuple):
    """The text that one delta adds to a choice.

    `text`: the text that these tokens made certain. `rest`: text that was held back until the choice ended.
    `position`: tokens of the call that the client has with this delta. `logprobs`: of the tokens of the delta, None
    unless the call asks for them; without records if the call asks for token ids only. `stop_reason`: the stop string
    or stop token that ended the choice. `parts` and `rest_parts`: the text in parts if the choice has a parser; then
    `text` and `rest` are empty.
    """

    choice: int
    text: str
    rest: str
    finish_reason: str | None
    position: int
    score: float | None = None
    logprobs: ScoredTokens | None = None
    stop_reason: str | int | None = None
    parts: tuple[AnswerPart, ...] | None = None
    rest_parts: tuple[AnswerPart, ...] = ()


class Choice(NamedTuple):
    """A complete choice.

    score: the value that it was ranked by; None if the call ranks no choices. parts: the merged parts if the choice has
    a parser; then `text` is empty. prompt: the prompt of the choice, if the answer has it. `TextDelta` explains all
    other fields.
    """

    text: str
    finish_reason: str
    score: float | None = None
    logprobs: ScoredTokens | None = None
    stop_reason: str | int | None = None
    prompt: PromptText | None = None
    parts: Sequence[AnswerPart] = ()

    @property
    def ranking(self) -> str:
        """The field that the ranking adds to the choice's JSON object; empty without a score."""
        return "" if self.score is None else f',"score":{self.score!r}'


_new = tuple.__new__


class _RequestText:
    """The text of one request. `first_choice`: index of the request's first choice in the answer of the call."""

    def __init__(self, model: ServedModel, metadata: CallMetadata, request_id: str, first_choice: int) -> None:
        self.choices = [ChoiceText(model, metadata) for _ in range(metadata.n)]
        self._first_choice = first_choice
        self._model, self._metadata = model, metadata
        self._keeps_ids = metadata.return_token_ids
        self.tokens = 0
        # One per choice; empty if the call has plain text.
        self._parts: list[ChoiceParts] = []
        if (output := metadata.output()) is not None:
            self._parts = [ChoiceParts(output.parser(), request_id, index) for index in range(metadata.n)]
        self.cached_tokens = 0
        self.pinned_tokens = (0, 0)
        self.prompt: PromptText | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning of all choices."""
        return sum(parts.reasoning_tokens for parts in self._parts)

    def begin(self, report: PromptReport) -> None:
        """Take the worker's report about the prompt from the first item."""
        self.cached_tokens, self.pinned_tokens = report.cached_tokens, report.pinned_tokens
        if self._metadata.needs_prompt:
            model, metadata = self._model, self._metadata
            self.prompt = PromptText(
                report,
                model.tokenizer,
                model.token_texts,
                frozenset(model.special_tokens.values()) if metadata.skip_special_tokens else (),
                model.drops_first_space,
                metadata.echoes_prompt,
            )
            for choice in self.choices:
                choice.length = len(self.prompt.text)

    def _stop_reason(self, delta: Delta) -> str | int | None:
        """Return the stop string or the stop token that ended a choice; None if another reason did."""
        if delta.matched_stop != BY_TOKEN:
            return delta.matched_stop
        if not delta.token_ids:
            return None
        token_id = delta.token_ids[-1]
        # A stop string may be the text of a special token.
        special = self._model.special_tokens
        return next((text for text in self._metadata.stop if special.get(text) == token_id), token_id)

    def feed(self, item: StepItem, others: int) -> list[TextDelta]:
        """Return the deltas of an item in order, without those that add nothing.

        `others`: tokens of the call's other requests that the client has.
        """
        first, choices = self._first_choice, self.choices
        text_deltas: list[TextDelta] = []
        position = others + item.start
        for delta in item.deltas:
            index, token_ids, reason, _, score, records = delta
            position += len(token_ids)
            if index >= len(choices):
                continue
            choice = choices[index]
            if choice.finish_reason is not None:
                continue
            if self._parts:
                if reason is None and len(token_ids) == 1 and not records and not self._keeps_ids:
                    # `_feed_parts` of the common case.
                    if parts := self._parts[index].push(choice.push(delta), 1):
                        fields = (first + index, "", "", None, position, score, None, None, parts, ())
                        text_deltas.append(_new(TextDelta, fields))
                else:
                    text_deltas += self._feed_parts(delta, position - len(token_ids))
                continue
            if records or self._keeps_ids:
                text, scored = choice.push_scored(delta, records or b"")
            else:
                text, scored = choice.push(delta), None
            if reason is not None:
                rest, stop_reason = choice.finish(reason), self._stop_reason(delta)
                text_deltas.append(TextDelta(first + index, text, rest, reason, position, score, scored, stop_reason))
            elif text or scored is not None:
                # This runs for every token, and the constructor of a named tuple is slow.
                text_deltas.append(
                    _new(TextDelta, (first + index, text, "", None, position, None, scored, None, None, ()))
                )
        self.tokens = position - others
        if item.outcome is not None and item.outcome.name in COMPLETE:
            for index, choice in enumerate(choices):
                if choice.finish_reason is None:
                    delta = Delta(index, (), item.outcome.name)
                    if self._parts:
                        text_deltas += self._feed_parts(delta, position)
                    else:
                        rest = choice.finish(item.outcome.name)
                        text_deltas.append(TextDelta(first + index, "", rest, item.outcome.name, position))
        return text_deltas

    def _feed_parts(self, delta: Delta, position: int) -> Iterator[TextDelta]:
        """Yield the parts of each token of a delta; `position`: tokens of the call before it."""
        choice, parts = self.choices[delta.choice], self._parts[delta.choice]
        index = self._first_choice + delta.choice
        for token in delta.tokens():
            position += len(token.token_ids)
            scored: ScoredTokens | None = None
            if token.logprobs or self._keeps_ids:
                text, scored = choice.push_scored(token, token.logprobs or b"")
            else:
                text = choice.push(token)
            new_parts = parts.push(text, len(token.token_ids))
            reason = token.finish_reason
            rest: tuple[AnswerPart, ...] = ()
            if reason is not None:
                rest = parts.finish(choice.finish(reason))
                if reason == OutcomeName.STOP and parts.ends_with_call:
                    reason = choice.finish_reason = TOOL_CALLS
            if new_parts or rest or reason or scored is not None:
                stop_reason = self._stop_reason(token) if reason is not None else None
                # This runs for every token, and the constructor of a named tuple is slow.
                fields = (index, "", "", reason, position, token.score, scored, stop_reason, new_parts, rest)
                yield _new(TextDelta, fields)


class Transcript:
    """The text of all requests of a call as it grows."""

    def __init__(
        self, metadata: CallMetadata, model: ServedModel, request_ids: Iterable[str], is_joined: bool = False
    ) -> None:
        """`request_ids`: in the order of the prompts. `is_joined`: whether another HTTP request made the call."""
        self.metadata = metadata
        self.model_name = metadata.model_name(model.name)
        self.is_joined = is_joined
        self._requests = {
            request_id: _RequestText(model, metadata, request_id, first_choice=index * metadata.n)
            for index, request_id in enumerate(request_ids)
        }
        self._open = len(self._requests)
        self.tokens = 0
        self.outcome: Outcome | None = None
        # False once a request has ended that says so of its answer (`Outcome.is_exact`).
        self.is_exact = True
        self._failed = False

    @property
    def ended(self) -> bool:
        """True if all requests have ended, or one has failed."""
        return self._open == 0 or self._failed

    @property
    def error(self) -> api_errors.ApiError | None:
        """The error for the client if a request failed."""
        if self.outcome is None or not self._failed:
            return None
        detail = self.outcome.detail
        if isinstance(self.outcome, NoWorkerOutcome):
            is_faulty = isinstance(self.outcome, NotLoadedOutcome)
            kind = api_errors.ModelNotLoaded if is_faulty else api_errors.NoWorkers
            return kind(detail, headers={"Retry-After": str(NO_WORKER_RETRY_S)})
        if isinstance(self.outcome, ParkedOutcome):
            return api_errors.Parked(PARKED_MESSAGE, headers={"X-Should-Retry": "false"})
        if isinstance(self.outcome, RevokedOutcome):
            return api_errors.ApiKeyWrong(detail)
        if isinstance(self.outcome, ClosedOutcome):
            return api_errors.ShuttingDown(detail, headers={"Retry-After": "1"})
        if self.outcome.name == OutcomeName.CANCELLED:
            return api_errors.Cancelled(detail or "The request was cancelled.")
        if self.outcome.name == OutcomeName.DEADLINE:
            return api_errors.DeadlinePassed(detail or "The deadline of the request passed.")
        code = "quarantined" if self.outcome.name == OutcomeName.QUARANTINED else None
        return api_errors.GenerationFailed(detail or "The request failed.", code=code)

    @property
    def usage(self) -> dict[str, Any]:
        cached_tokens = sum(request.cached_tokens for request in self._requests.values())
        usage = self.usage_at(self.tokens) | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
        reasoning_tokens = sum(request.reasoning_tokens for request in self._requests.values())
        for request in self._requests.values():
            if any(request.pinned_tokens):  # only a message has breakpoints, and it is a single request
                usage["pinned_tokens"] = request.pinned_tokens
        details = {"reasoning_tokens": reasoning_tokens} if reasoning_tokens else {}
        if self.outcome is not None and (counts := self.outcome.prediction) is not None:
            # Only a chat has a prediction, and it is a single request.
            details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = counts
        return usage | {"completion_tokens_details": details} if details else usage

    def usage_at(self, tokens: int) -> dict[str, Any]:
        """Return the usage at the event with this number of tokens."""
        prompt_tokens = self.metadata.prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        }

    @property
    def prompts(self) -> list[PromptText | None]:
        """The prompts of the call in order; None for those that the answer does not have."""
        return [request.prompt for request in self._requests.values()]

    def prompt_of(self, request_id: str) -> tuple[int, PromptText | None]:
        """Return the index of a request's prompt, and the prompt if the answer has it."""
        return list(self._requests).index(request_id), self._requests[request_id].prompt

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reasons of the choices that have ended, in order."""
        choices = [choice for request in self._requests.values() for choice in request.choices]
        return [choice.finish_reason for choice in choices if choice.finish_reason is not None]

    def feed(self, item: StepItem) -> list[TextDelta]:
        """Return the text that an item adds; choices and tokens are counted over all requests."""
        request = self._requests[item.request_id]
        others = self.tokens - request.tokens
        if item.report is not None:
            request.begin(item.report)
        text_deltas = request.feed(item, others)
        self.tokens = others + request.tokens
        if item.outcome is not None:
            self._open -= 1
            self.is_exact = self.is_exact and item.outcome.is_exact
            if not self._failed:
                self.outcome = item.outcome
                self._failed = item.outcome.name not in COMPLETE
        return text_deltas


# The transcript that answers an HTTP request, for the access log and the trace.
TRANSCRIPT = web.RequestKey("transcript", Transcript)

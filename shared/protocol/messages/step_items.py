"""Step items: the result of one engine step for one request. Items are arrays, because an item is sent for every token.

    item  = [version, request id, start, deltas, outcome]      start: tokens of the request before this item
    delta = [choice, token ids, finish reason | nil, matched stop string | nil, score | nil, logprobs | nil]
    outcome = nil | [name, detail] | [name, detail, embedding] | [name, detail, nil, [accepted, rejected]]
            | [name, detail, nil, nil, is exact]

The first item of a request may have one element more: a report about the prompt (prompt_report.py).

A published frame, and an entry of the output log, is a plain concatenation of items.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack

from quire.shared.config.validators import MAX_TOKEN_ID, Flag, Integer, InvalidValue, Number, Text
from quire.shared.protocol.logprobs import check_records, record_size
from quire.shared.protocol.messages.codec import VERSION, MessageError, pack
from quire.shared.protocol.messages.prompt_report import PromptReport, read_report
from quire.shared.protocol.messages.requests import MAX_ID_LENGTH
from quire.shared.protocol.sampling_params import MAX_CHOICES, MAX_OUTPUT_TOKENS, MAX_STOP_LENGTH
from quire.shared.protocol.states import OutcomeName

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_START = MAX_CHOICES * MAX_OUTPUT_TOKENS
# Bound of the counts of a prediction: a step may compute several of its tokens for each token of the answer.
MAX_PREDICTED = 2**53
# Largest size of an embedding: float32 numbers, as many as the hidden state of the model has.
MAX_EMBEDDING_BYTES = 4 * 65536

# Every accepted request ends with exactly one of these outcomes.
OUTCOMES: tuple[str, ...] = tuple(OutcomeName)

# `Delta.matched_stop` of a choice that a token of `stop_token_ids` ended.
BY_TOKEN = ""

_id = Text(0, MAX_ID_LENGTH)
_start = Integer(0, MAX_START)
_predicted = Integer(0, MAX_PREDICTED)
_choice = Integer(0, MAX_CHOICES - 1)
_token_id = Integer(0, MAX_TOKEN_ID)
_reason = Text(0, 32)
_matched_stop = Text(0, MAX_STOP_LENGTH)
_score = Number(-sys.float_info.max, sys.float_info.max)
_detail = Text(0, 8192)
_is_exact = Flag()
_new = tuple.__new__


class Delta(NamedTuple):
    """New tokens of one choice of a request, and the finish reason if the choice ended.

    matched_stop: the stop string that ended the choice; BY_TOKEN if its last token did; None in all other cases.
    score: the number by which best_of (mean log-probability) or beam search ranked the choice; None without a ranking.
    logprobs: the records of the tokens (`logprobs.py`); None if the call does not ask for them.
    """

    choice: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    matched_stop: str | None = None
    score: float | None = None
    logprobs: bytes | None = None

    def first(self, count: int) -> Delta:
        """Return the delta with the first `count` of its more than `count` tokens, without the end of the choice."""
        records = self.logprobs
        if records is not None:
            records = records[: count * record_size(records, len(self.token_ids))]
        return Delta(self.choice, self.token_ids[:count], logprobs=records)

    def tokens(self) -> Iterator[Delta]:
        """Yield the delta in pieces of a token each, the last with the end of the choice; without tokens, the delta."""
        count = len(self.token_ids)
        if count <= 1:
            yield self
            return
        size = record_size(self.logprobs, count) if self.logprobs is not None else 0
        for at, token_id in enumerate(self.token_ids):
            records = self.logprobs[at * size : (at + 1) * size] if self.logprobs is not None else None
            piece = Delta(self.choice, (token_id,), logprobs=records)
            yield piece if at < count - 1 else self._replace(token_ids=(token_id,), logprobs=records)

    def without_first(self, count: int) -> Delta:
        """Return the tokens after the first `count`, with the end of the choice. There may be no tokens left."""
        records = self.logprobs
        if records is not None:
            records = records[count * record_size(records, len(self.token_ids)) :]
        return self._replace(token_ids=self.token_ids[count:], logprobs=records)


class PredictionCounts(NamedTuple):
    """How many tokens of a request's prediction the attempt that ended it drafted: accepted ones, and the others."""

    accepted: int
    rejected: int


class Outcome(NamedTuple):
    """The end of the whole request. `detail` tells people the cause and the remedy.

    embedding: of a request with a `pooling`, little-endian float32, not normalised, or logits; None for any other
    request, and if the request has failed. prediction: of a request with a prediction that a worker with speculation
    has completed. is_exact: False if another computation than the one that began the answer has drawn its rest, so that
    the answer may differ from one without a break.
    """

    name: str
    detail: str = ""
    embedding: bytes | None = None
    prediction: PredictionCounts | None = None
    is_exact: bool = True

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of the message: nearly always two, as the scripts write them."""
        if not self.is_exact:
            return self[:]
        if self.prediction is not None:
            return self[:4]
        return self[:2] if self.embedding is None else self[:3]


class StepItem(NamedTuple):
    """The effect of one engine step on one request: tokens `[start, end)`, counted over all its choices."""

    request_id: str
    start: int
    deltas: tuple[Delta, ...]
    outcome: Outcome | None = None
    report: PromptReport | None = None

    @property
    def end(self) -> int:
        """The tokens of the request up to and including this item."""
        end = self.start
        for delta in self.deltas:  # nearly always one
            end += len(delta.token_ids)
        return end

    def joined(self, after: StepItem) -> StepItem | None:
        """Return this item and the next one of the request as one; None unless both have one choice, the same, or none.

        A worker that lags behind calls this for every token.
        """
        old, new = self.deltas, after.deltas
        if len(old) > 1 or len(new) > 1:
            return None
        if old and new:
            choice, token_ids, _, _, _, records = old[0]
            other, more, reason, stop, score, more_records = new[0]
            if choice != other:
                return None
            if more_records:
                records = (records or b"") + more_records
            new = (Delta(choice, token_ids + more, reason, stop, score, records),)
        return StepItem(self.request_id, self.start, new or old, after.outcome, self.report)

    def encode(self) -> bytes:
        """Return the item as a message: the named tuples have their fields in the order of the message."""
        outcome = None if self.outcome is None else self.outcome.values
        if self.report is None:
            return pack((VERSION, *self[:3], outcome))
        return pack((VERSION, *self[:3], outcome, self.report.values))


def decode_items(data: bytes, limit: int | None = None) -> Iterator[StepItem]:
    """Yield the items of a frame or of a log entry, in order. `limit` in bytes is by default MAX_FRAME_BYTES.

    Raise MessageError at the first malformed item, and for data over the limit.
    """
    limit = MAX_FRAME_BYTES if limit is None else limit
    # Tuples, because this runs for every token: named tuples are made of them without a copy in Python.
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=True, max_buffer_size=limit, use_list=False)
    try:
        unpacker.feed(data)
        while unpacker.tell() < len(data):
            yield _item(unpacker.unpack())
    except Exception as error:  # InvalidValue, and the errors of msgpack: ValueError, StackError, OutOfData ...
        raise MessageError(f"not a sequence of step items: {error}") from error


def _item(value: Any) -> StepItem:
    report = None
    if type(value) is not tuple or len(value) != 5:
        value, report = _split_report(value)
    version, request_id, start, deltas, outcome = value
    if version != VERSION:
        raise InvalidValue("a step item", f"must have the version {VERSION}, not {version!r:.80}")
    if type(deltas) is not tuple or len(deltas) > MAX_CHOICES:
        raise InvalidValue("deltas", "must be an array")
    # The checks of the common case are written out, because calls cost time here; the validators only raise.
    if type(request_id) is not str or len(request_id) > MAX_ID_LENGTH:
        _id("request id", request_id)
    if type(start) is not int or not 0 <= start <= MAX_START:
        _start("start", start)
    if outcome is not None:
        outcome = _outcome(outcome)
    deltas = (_delta(deltas[0]),) if len(deltas) == 1 else tuple(map(_delta, deltas))
    return _new(StepItem, (request_id, start, deltas, outcome, report))


def _split_report(value: Any) -> tuple[tuple[Any, ...], PromptReport]:
    """Return the five elements of an item, and the report after them."""
    if type(value) is not tuple or len(value) != 6:
        raise InvalidValue("a step item", f"must be an array of 5 or 6, not {value!r:.80}")
    return value[:5], read_report(value[5])


def _delta(value: Any) -> Delta:
    if type(value) is not tuple or len(value) != 6:
        raise InvalidValue("a delta", f"must be an array of 6, not {value!r:.80}")
    choice, token_ids, reason, stop, score, records = value
    if type(choice) is not int or not 0 <= choice < MAX_CHOICES:
        _choice("choice", choice)
    if type(token_ids) is not tuple or len(token_ids) > MAX_OUTPUT_TOKENS:
        raise InvalidValue("token ids", f"must be an array of at most {MAX_OUTPUT_TOKENS} integers")
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            _token_id("token ids", token_id)
    if reason is None and stop is None and score is None and records is None:
        return _new(Delta, value)
    return Delta(
        choice,
        token_ids,
        None if reason is None else _reason("finish reason", reason),
        None if stop is None else _matched_stop("matched stop", stop),
        None if score is None else _score("score", score),
        None if records is None else _records(records, len(token_ids)),
    )


def _records(value: Any, count: int) -> bytes:
    if type(value) is not bytes:
        raise InvalidValue("logprobs", f"must be bytes, not {value!r:.80}")
    if problem := check_records(value, count):
        raise InvalidValue("logprobs", f"are wrong: {problem}")
    return value


def _outcome(value: Any) -> Outcome:
    # The scripts in Redis end requests, too, and write two values.
    if type(value) is not tuple or not 2 <= len(value) <= 5 or value[0] not in OUTCOMES:
        raise InvalidValue("an outcome", f"must be one of {', '.join(OUTCOMES)} with a detail, not {value!r:.80}")
    name, detail, embedding, prediction = (*value, None, None)[:4]
    return Outcome(
        name,
        _detail("detail", detail),
        None if embedding is None else _embedding(embedding),
        None if prediction is None else _prediction(prediction),
        _is_exact("is exact", value[4]) if len(value) > 4 else True,
    )


def _embedding(value: Any) -> bytes:
    if type(value) is not bytes or not 0 < len(value) <= MAX_EMBEDDING_BYTES or len(value) % 4:
        raise InvalidValue("an embedding", f"must be packed 32-bit floats, at most {MAX_EMBEDDING_BYTES} bytes")
    return value


def _prediction(value: Any) -> PredictionCounts:
    if type(value) is not tuple or len(value) != 2:
        raise InvalidValue("a prediction", f"must be an array of 2, not {value!r:.80}")
    return PredictionCounts(_predicted("accepted tokens", value[0]), _predicted("rejected tokens", value[1]))

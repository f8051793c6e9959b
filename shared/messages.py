"""What travels between gateway and worker, and its strict msgpack form.

Requests and worker cards are maps with a version; decoding accepts exactly the known keys, the right types and bounded
sizes, and never an ExtType or a Timestamp. Step items, which are sent for every token, are arrays.

    item  = [version, request id, start, deltas, outcome]      start: tokens of the request that came before this item
    delta = [choice, token ids, finish reason | nil, matched stop string | nil, score | nil, logprobs | nil]
    outcome = nil | [name, detail]

A published frame, and an entry of the output log, is a plain concatenation of items.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar, cast

import msgpack

from quire.shared.logprobs import MAX_TOP_LOGPROBS, check_records, record_size
from quire.shared.states import OutcomeName

VERSION = 4

# Bounds of what is decoded. They are generous: the gateway enforces the limits that users meet.
MAX_PROMPT_TOKENS = 2_000_000
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
# Of `Delta.matched_stop`: it was a token of `stop_token_ids`, and no string.
BY_TOKEN = ""
MAX_STOP_TOKENS = 64  # and one for each stop string that is a special token
MAX_CHOICES = 128
MAX_OUTPUT_TOKENS = 2_000_000
MAX_SALT_LENGTH = 256
MAX_SCHEMA_LENGTH = 65_536
MAX_LENGTH_PENALTY = 10
MAX_BIASES = 1024
MAX_BIAS = 100
MAX_ID_LENGTH = 128
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_FRAME_BYTES = 64 * 1024 * 1024

OUTCOMES = tuple(outcome.value for outcome in OutcomeName)

# When a beam search ends: Hugging Face's `early_stopping` False, True and "never".
EARLY_STOPPING = ("false", "true", "never")


class MessageError(ValueError):
    """A message that is not of this protocol: what was wrong with which field."""


Check = Callable[[str, Any], Any]
T = TypeVar("T")


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise MessageError(f"{name} must be an integer from {low} to {high}, not {value!r:.80}")
        return value

    return check


def _number(low: float, high: float) -> Check:
    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise MessageError(f"{name} must be a number from {low} to {high}, not {value!r:.80}")
        return float(value)

    return check


def _flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise MessageError(f"{name} must be true or false, not {value!r:.80}")
    return value


def _one_of(choices: tuple[str, ...]) -> Check:
    def check(name: str, value: Any) -> str:
        if type(value) is not str or value not in choices:
            raise MessageError(f"{name} must be one of {', '.join(choices)}, not {value!r:.80}")
        return value

    return check


def _text(limit: int) -> Check:
    def check(name: str, value: Any) -> str:
        if type(value) is not str or len(value) > limit:
            raise MessageError(f"{name} must be a string of at most {limit} characters")
        return value

    return check


def _texts(count: int, limit: int) -> Check:
    one = _text(limit)

    def check(name: str, value: Any) -> tuple[str, ...]:
        if type(value) is not list or len(value) > count:
            raise MessageError(f"{name} must be a list of at most {count} strings")
        return tuple(one(name, item) for item in value)

    return check


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if type(value) is not bytes or len(value) % 4 or len(value) > 4 * MAX_PROMPT_TOKENS:
        raise MessageError(f"{name} must be packed 32-bit token ids, at most {MAX_PROMPT_TOKENS}")
    return unpack_token_ids(value)


def _integers(count: int) -> Check:
    one = _integer(0, 2**31 - 1)

    def check(name: str, value: Any) -> tuple[int, ...]:
        if type(value) is not list or len(value) > count:
            raise MessageError(f"{name} must be a list of at most {count} integers")
        return tuple(one(name, item) for item in value)

    return check


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if type(value) is not list or len(value) > MAX_BIASES:
        raise MessageError(f"{name} must be a list of at most {MAX_BIASES} pairs")
    if any(type(pair) is not list or len(pair) != 2 for pair in value):
        raise MessageError(f"{name} must be a list of pairs of a token id and a bias")
    token_id, bias = _integer(0, 2**31 - 1), _number(-MAX_BIAS, MAX_BIAS)
    return tuple((token_id(name, pair[0]), bias(name, pair[1])) for pair in value)


def pack_token_ids(token_ids: tuple[int, ...] | list[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers (every machine that Quire runs on is little-endian)."""
    return array("I", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> tuple[int, ...]:
    ids = array("I")
    ids.frombytes(data)
    return tuple(ids)


def _field(check: Check, **default: Any) -> Any:
    return field(metadata={"check": check}, **default)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. Every value is final: the gateway has filled in defaults and drawn a seed where none was
    given.

    `top_k` 0, `top_p` 1 and `min_p` 0 mean off; `temperature` 0 means greedy. Definitions follow the OpenAI API and,
    for what that lacks (top_k, min_p, repetition_penalty, min_tokens, ignore_eos, length_penalty, early_stopping),
    Hugging Face `GenerationConfig`.

    `best_of` sequences are drawn, of which the `n` with the highest mean log-probability are returned; 0: as many as
    `n`. A `beam_width` other than 0 asks for a beam search instead, with that many beams. The score of a finished beam
    is the sum of its log-probabilities / length ** `length_penalty`.

    A token of `stop_token_ids` ends a sequence like an end token of the model, also with `ignore_eos`, and is not in
    the text.

    `logit_bias` has pairs of a token id and what is added to its logit, behind penalties.

    `json_schema` is the text of a schema that every choice follows; empty: none. Not in a beam search.

    `logprobs` asks for the log-probability of every token, `top_logprobs` for those of so many of the most probable
    ones in its place too.
    """

    max_tokens: int = _field(_integer(1, MAX_OUTPUT_TOKENS))
    seed: int = _field(_integer(0, 2**64 - 1), default=0)
    n: int = _field(_integer(1, MAX_CHOICES), default=1)
    temperature: float = _field(_number(0, 100), default=1.0)
    top_p: float = _field(_number(0, 1), default=1.0)
    top_k: int = _field(_integer(0, 2**31 - 1), default=0)
    min_p: float = _field(_number(0, 1), default=0.0)
    presence_penalty: float = _field(_number(-2, 2), default=0.0)
    frequency_penalty: float = _field(_number(-2, 2), default=0.0)
    repetition_penalty: float = _field(_number(1e-6, 100), default=1.0)
    min_tokens: int = _field(_integer(0, MAX_OUTPUT_TOKENS), default=0)
    ignore_eos: bool = _field(_flag, default=False)
    stop: tuple[str, ...] = _field(_texts(MAX_STOP_STRINGS, MAX_STOP_LENGTH), default=())
    best_of: int = _field(_integer(0, MAX_CHOICES), default=0)
    beam_width: int = _field(_integer(0, MAX_CHOICES), default=0)
    length_penalty: float = _field(_number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY), default=1.0)
    early_stopping: str = _field(_one_of(EARLY_STOPPING), default="false")
    logprobs: bool = _field(_flag, default=False)
    top_logprobs: int = _field(_integer(0, MAX_TOP_LOGPROBS), default=0)
    stop_token_ids: tuple[int, ...] = _field(_integers(MAX_STOP_TOKENS + MAX_STOP_STRINGS), default=())
    logit_bias: tuple[tuple[int, float], ...] = _field(_biases, default=())
    json_schema: str = _field(_text(MAX_SCHEMA_LENGTH), default="")

    @property
    def num_sequences(self) -> int:
        """How many sequences run at once for one prompt."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_streamed(self) -> bool:
        """Whether tokens leave step by step; otherwise all choices come in one item at the end, once they are
        ranked."""
        return not self.beam_width and self.best_of in (0, self.n)


def _sampling(name: str, value: Any) -> SamplingParams:
    return _from_map(SamplingParams, name, value)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One accepted request as the worker gets it: token ids and numbers, no text but the stop strings.

    Requests share cached prefixes only with those of the same `cache_salt`.
    """

    id: str = _field(_text(MAX_ID_LENGTH))
    model: str = _field(_text(512))
    prompt: tuple[int, ...] = _field(_token_ids)
    sampling: SamplingParams = _field(_sampling)
    cache_salt: str = _field(_text(MAX_SALT_LENGTH), default="")
    version: int = _field(_integer(VERSION, VERSION), default=VERSION)

    @property
    def cost(self) -> int:
        """Tokens that the request may occupy: what admission and placement count."""
        return len(self.prompt) + self.sampling.num_sequences * self.sampling.max_tokens

    def encode(self) -> bytes:
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> GenerationRequest:
        return _from_map(cls, "request", unpack(data, MAX_BODY_BYTES))


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """What a worker tells gateways about itself with every beat."""

    worker_id: str = _field(_text(256))
    incarnation: str = _field(_text(64))
    model: str = _field(_text(512))
    max_model_len: int = _field(_integer(1, MAX_PROMPT_TOKENS))
    max_num_seqs: int = _field(_integer(1, 65536))
    vocab_size: int = _field(_integer(1, 2**31 - 1))
    eos_token_ids: tuple[int, ...] = _field(_integers(64))
    block_size: int = _field(_integer(1, 65536))
    total_blocks: int = _field(_integer(1, 2**40))
    free_blocks: int = _field(_integer(0, 2**40))
    running: int = _field(_integer(0, 2**31))
    waiting: int = _field(_integer(0, 2**31))
    steps: int = _field(_integer(0, 2**62))
    version: int = _field(_integer(VERSION, VERSION), default=VERSION)

    def encode(self) -> bytes:
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> WorkerCard:
        return _from_map(cls, "worker card", unpack(data, 65536))


class Delta(NamedTuple):
    """What one choice of a request gained: new token ids, and why it ended if it did.

    `matched_stop`: the stop string that ended it, or BY_TOKEN, and then it is the last token here; None for all else.
    `score`: by what best_of (mean log-probability) or beam search ranked the choice; None if nothing was ranked.
    `logprobs`: the records of the tokens (`quire.shared.logprobs`); None if they were not asked for.
    """

    choice: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    matched_stop: str | None = None
    score: float | None = None
    logprobs: bytes | None = None

    def first(self, count: int) -> Delta:
        """Its first `count` tokens, of more: so without how the choice ended."""
        records = self.logprobs
        if records is not None:
            records = records[: count * record_size(records, len(self.token_ids))]
        return Delta(self.choice, self.token_ids[:count], logprobs=records)

    def without_first(self, count: int) -> Delta:
        """The rest, which may be no more than how the choice ended."""
        records = self.logprobs
        if records is not None:
            records = records[count * record_size(records, len(self.token_ids)) :]
        return self._replace(token_ids=self.token_ids[count:], logprobs=records)


class Outcome(NamedTuple):
    """How the whole request ended. `detail` is for people: what went wrong, and the remedy."""

    name: str
    detail: str = ""


class StepItem(NamedTuple):
    """What one engine step did for one request: tokens `[start, end)` of all its choices together."""

    request_id: str
    start: int
    deltas: tuple[Delta, ...]
    outcome: Outcome | None = None

    @property
    def end(self) -> int:
        end = self.start
        for delta in self.deltas:  # which is one nearly always
            end += len(delta.token_ids)
        return end

    def encode(self) -> bytes:
        return _pack((VERSION, *self))  # fields, and those of deltas and outcome, are in the order of the wire


def decode_items(data: bytes, limit: int | None = None) -> Iterator[StepItem]:
    """The items of a frame or of a log entry, in order. Raises MessageError at the first that is malformed, and where
    there is more than `limit`, by default MAX_FRAME_BYTES."""
    limit = MAX_FRAME_BYTES if limit is None else limit
    # Tuples, most of which stay: this runs for every token.
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=True, max_buffer_size=limit, use_list=False)
    try:
        unpacker.feed(data)
        while unpacker.tell() < len(data):
            yield _item(unpacker.unpack())
    except MessageError:
        raise
    except Exception as error:  # msgpack raises ValueError, StackError, FormatError, OutOfData, UnicodeDecodeError ...
        raise MessageError(f"not a sequence of step items: {error}") from error


MAX_START = MAX_CHOICES * MAX_OUTPUT_TOKENS
MAX_TOKEN_ID = 2**31 - 1
_choice = _integer(0, MAX_CHOICES - 1)
_start = _integer(0, MAX_START)
_token_id = _integer(0, MAX_TOKEN_ID)
_reason = _text(32)
_matched_stop = _text(MAX_STOP_LENGTH)
_score = _number(-sys.float_info.max, sys.float_info.max)
_detail = _text(8192)
_id = _text(MAX_ID_LENGTH)
_new = tuple.__new__


def _item(value: Any) -> StepItem:
    if type(value) is not tuple or len(value) != 5 or value[0] != VERSION:
        raise MessageError(f"a step item must be an array of 5 with version {VERSION}, not {value!r:.80}")
    _, request_id, start, deltas, outcome = value
    if type(deltas) is not tuple or len(deltas) > MAX_CHOICES:
        raise MessageError("deltas must be an array")
    # What is as it nearly always is costs no call, and named tuples are made of tuples as they are.
    if type(request_id) is not str or len(request_id) > MAX_ID_LENGTH:
        _id("request id", request_id)
    if type(start) is not int or not 0 <= start <= MAX_START:
        _start("start", start)
    if outcome is not None:
        outcome = _outcome(outcome)
    deltas = (_delta(deltas[0]),) if len(deltas) == 1 else tuple(map(_delta, deltas))
    return _new(StepItem, (request_id, start, deltas, outcome))


def _delta(value: Any) -> Delta:
    if type(value) is not tuple or len(value) != 6:
        raise MessageError(f"a delta must be an array of 6, not {value!r:.80}")
    choice, token_ids, reason, stop, score, records = value
    if type(choice) is not int or not 0 <= choice < MAX_CHOICES:
        _choice("choice", choice)
    if type(token_ids) is not tuple or len(token_ids) > MAX_OUTPUT_TOKENS:
        raise MessageError(f"token ids must be a list of at most {MAX_OUTPUT_TOKENS} integers")
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
        raise MessageError(f"logprobs must be bytes, not {value!r:.80}")
    if problem := check_records(value, count):
        raise MessageError(f"logprobs: {problem}")
    return value


def _outcome(value: Any) -> Outcome:
    if type(value) is not tuple or len(value) != 2 or value[0] not in OUTCOMES:
        raise MessageError(f"an outcome must be one of {', '.join(OUTCOMES)} with a detail, not {value!r:.80}")
    return Outcome(value[0], _detail("detail", value[1]))


def unpack(data: bytes, limit: int) -> Any:
    """One msgpack object of at most `limit` bytes, without extension types. Raises MessageError."""
    if len(data) > limit:
        raise MessageError(f"a message of {len(data)} bytes is over the limit of {limit}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=True)
    except Exception as error:  # as in decode_items: the library has no common base class for what it raises
        raise MessageError(f"not msgpack: {error}") from error


def new_packer() -> Any:
    """Of messages, for one thread."""
    return msgpack.Packer(use_bin_type=True)


class _Packers(threading.local):
    """One packer per thread: to make one costs more than to use it."""

    def __init__(self) -> None:
        self.one = new_packer()


_packers = _Packers()


def _pack(value: Any) -> bytes:
    packed: bytes = _packers.one.pack(value)
    return packed


def _encode(message: Any) -> bytes:
    def plain(value: Any) -> Any:
        if isinstance(value, SamplingParams):
            return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        return list(value) if isinstance(value, tuple) else value

    out = {f.name: plain(getattr(message, f.name)) for f in fields(message)}
    if "prompt" in out:
        out["prompt"] = pack_token_ids(message.prompt)
    return _pack(out)


def _from_map(cls: type[T], name: str, value: Any) -> T:
    if type(value) is not dict:
        raise MessageError(f"{name} must be a map, not {type(value).__name__}")
    known = {f.name: f for f in fields(cast(Any, cls))}
    if value.keys() != known.keys():
        wrong = sorted(str(key) for key in value.keys() ^ known.keys())
        raise MessageError(f"{name} has unknown or missing fields: {', '.join(wrong)[:200]}")
    return cls(**{key: known[key].metadata["check"](key, value[key]) for key in known})

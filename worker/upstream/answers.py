"""The chunks of an upstream's stream, read strictly: what it says is committed, so none of it is taken on trust."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.shared.protocol.states import OutcomeName
from quire.worker.upstream.client import StreamBroken

# Stands for minus infinity.
_LEAST = -9999.0
_REASONS = {"stop": OutcomeName.STOP, "content_filter": OutcomeName.STOP, "length": OutcomeName.LENGTH}
# Why a llama.cpp server ended an answer.
_STOP_TYPES = {"eos": OutcomeName.STOP, "word": OutcomeName.STOP, "limit": OutcomeName.LENGTH}


# The log-probability of a token, and the most probable tokens at its place.
TokenScores = tuple[float, tuple[tuple[int, float], ...]]


class Chunk(NamedTuple):
    """A piece of an answer.

    token_ids: None if the upstream sends text only. logprobs: for each token its log-probability and the most probable
    tokens, the most probable first. reason: of the end of the answer, as Quire names it.
    """

    token_ids: tuple[int, ...] | None
    text: str
    reason: str | None
    logprobs: tuple[TokenScores, ...] = ()

    def without_first(self, count: int) -> Chunk:
        """Return the chunk without its first `count` tokens."""
        if not count or self.token_ids is None:
            return self
        return self._replace(token_ids=self.token_ids[count:], logprobs=self.logprobs[count:])


def read_completion(event: dict[str, Any], vocab_size: int, returns_ids: bool, scored: bool) -> Chunk | None:
    """Read an event of `/v1/completions`. None if it has no choice, such as the one with the usage."""
    choices = event.get("choices")
    if not isinstance(choices, list) or any(not isinstance(choice, dict) for choice in choices):
        raise StreamBroken("an event of its stream has no `choices`")
    if not choices:
        return None
    choice = choices[0]
    token_ids = _token_ids(choice.get("token_ids") or [], vocab_size) if returns_ids else None
    logprobs = _named_logprobs(choice.get("logprobs"), vocab_size) if scored and token_ids else ()
    return Chunk(token_ids, _text(choice.get("text")), _reason(choice.get("finish_reason"), _REASONS), logprobs)


def read_native(event: dict[str, Any], vocab_size: int) -> Chunk:
    """Read an event of llama.cpp's `/completion`."""
    token_ids = _token_ids(event.get("tokens") or [], vocab_size)
    reason = _reason(event.get("stop_type"), _STOP_TYPES) if event.get("stop") is True else None
    return Chunk(token_ids, _text(event.get("content")), reason)


def records_of(chunk: Chunk, top_logprobs: int) -> bytes:
    """Return the log-probabilities of a chunk as step items carry them (`shared/protocol/logprobs.py`)."""
    if len(chunk.logprobs) != len(chunk.token_ids or ()):
        raise StreamBroken("it sends tokens without their log-probabilities")
    pack = struct.Struct("<f" + "If" * top_logprobs).pack
    records = b""
    for logprob, top in chunk.logprobs:
        if len(top) < top_logprobs:
            raise StreamBroken(f"it sends {len(top)} alternatives of a token, not {top_logprobs}")
        records += pack(logprob, *(part for pair in top[:top_logprobs] for part in pair))
    return records


def _token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(token) is not int or not 0 <= token < vocab_size for token in value):
        raise StreamBroken(f"it sends token ids outside of the vocabulary of {vocab_size}: is it another model?")
    return tuple(value)


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise StreamBroken("it sends a text that is none")
    return value or ""


def _reason(value: Any, known: dict[str, OutcomeName]) -> str | None:
    if value is None:
        return None
    if value not in known:
        raise StreamBroken(f"it ended the answer because of {str(value)[:40]!r}")
    return known[value]


def _named_logprobs(value: Any, vocab_size: int) -> tuple[TokenScores, ...]:
    """Read the log-probabilities of a completion whose tokens are named by their ids."""
    if not isinstance(value, dict):
        return ()
    own, tops = value.get("token_logprobs"), value.get("top_logprobs")
    if not isinstance(own, list):
        return ()
    tops = tops if isinstance(tops, list) and len(tops) == len(own) else [None] * len(own)
    return tuple(
        (_number(logprob), _ranked([(_id_of(name), value) for name, value in (top or {}).items()], vocab_size))
        for logprob, top in zip(own, tops, strict=True)
    )


def _ranked(pairs: Sequence[tuple[Any, Any]], vocab_size: int) -> tuple[tuple[int, float], ...]:
    _token_ids([token for token, _ in pairs], vocab_size)
    return tuple(sorted(((token, _number(value)) for token, value in pairs), key=lambda pair: -pair[1]))


def _id_of(name: str) -> int:
    number = name.removeprefix("token_id:")
    if not number.isdecimal() or len(number) > 10:
        raise StreamBroken("it names tokens by their texts in log-probabilities")
    return int(number)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or math.isnan(value):
        raise StreamBroken("it sends a log-probability that is no number")
    return min(0.0, max(_LEAST, float(value)))

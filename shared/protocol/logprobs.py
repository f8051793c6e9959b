"""Log-probabilities of tokens in step items, as packed bytes: records are cheap to cut and to join.

    record  = logprob | k times: token id, logprob      of the token, and of the k most probable tokens at its position
    records = record for each token of a delta          little-endian words of 32 bits: float32, and uint32 for ids

Of the tokens of a prompt, in a report about it:

    record  = logprob | rank | k times: token id, logprob
    records = record for each token of the prompt after the first      the first token has no probability

Log-probabilities are natural logarithms of the model's probabilities before temperature, penalties and bans. k is
`top_logprobs` or `prompt_logprobs` of the request, or the size of the vocabulary if that is less. The rank of a token
is 1 plus the number of tokens that are more probable at its position.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import NamedTuple

# OpenAI API reference, `top_logprobs`.
MAX_TOP_LOGPROBS = 20
_WORD = 4
# Records of a prompt that are decoded at once.
_PORTION = 64


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and the most probable ids at its position, most probable first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class PromptTokenLogprobs(NamedTuple):
    """Log-probability and rank of one token of a prompt, and the most probable ids at its position."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def record_bytes(top_logprobs: int) -> int:
    """Return the size in bytes of the record of one token."""
    return _WORD + 2 * _WORD * top_logprobs


def record_size(records: bytes, count: int) -> int:
    """Return the bytes per token of the records of `count` tokens."""
    return len(records) // count if count else 0


def check_records(records: bytes, count: int) -> str | None:
    """Return the fault of the records of `count` tokens; None for valid records."""
    size = record_size(records, count)
    if len(records) != size * count or (
        count and (size % (2 * _WORD) != _WORD or size > record_bytes(MAX_TOP_LOGPROBS))
    ):
        return f"{len(records)} bytes are no records of {count} tokens"
    words = array("f", records)
    for at in range(0, len(words), size // _WORD or 1):
        # Every other word of a record. This runs for every token. A NaN term makes the sum NaN.
        logprobs = words[at : at + size // _WORD : 2]
        if not (max(logprobs) <= 0 and sum(logprobs) <= 0):
            return "a log-probability is over 0, or none"
    return None


def read_records(records: bytes, count: int) -> list[TokenLogprobs]:
    """Decode the records of `count` tokens, which `check_records` has accepted."""
    if not count:
        return []
    form = struct.Struct("<f" + "If" * (record_size(records, count) // (2 * _WORD)))
    return [
        TokenLogprobs(words[0], tuple(zip(words[1::2], words[2::2], strict=True)))
        for words in form.iter_unpack(records)
    ]


def prompt_record_bytes(top_logprobs: int) -> int:
    """Return the size in bytes of the record of one token."""
    return 2 * _WORD * (1 + top_logprobs)


def check_prompt_records(records: bytes, count: int) -> str | None:
    """Return the fault of the records of `count` tokens; None for valid records."""
    size = len(records) // count if count else 0
    if len(records) != size * count or size % (2 * _WORD) or size > prompt_record_bytes(MAX_TOP_LOGPROBS):
        return f"{len(records)} bytes are no records of {count} tokens"
    if not count:
        return None
    if not size:
        return f"{count} tokens have no records"
    stride = size // _WORD
    logprobs, words = array("f", records), array("I", records)
    for column in (0, *range(3, stride, 2)):
        values = logprobs[column::stride]
        if not (max(values) <= 0 and sum(values) <= 0):  # a NaN term makes the sum NaN
            return "a log-probability is over 0, or none"
    if not min(words[1::stride]):
        return "a rank is 0"
    return None


def read_prompt_records(records: bytes, count: int) -> Iterator[PromptTokenLogprobs]:
    """Decode the records of `count` tokens, which `check_prompt_records` has accepted, lazily."""
    if not count:
        return
    size = len(records) // count
    form = struct.Struct("<fI" + "If" * (size // (2 * _WORD) - 1))
    for at in range(0, len(records), _PORTION * size):
        for words in form.iter_unpack(records[at : at + _PORTION * size]):
            yield PromptTokenLogprobs(words[0], words[1], tuple(zip(words[2::2], words[3::2], strict=True)))

"""Log-probabilities of tokens as step items carry them: bytes, which cost next to nothing to cut and to join.

    record  = logprob | k times: token id, logprob      of a token, and of the k most probable ones in its place
    records = record for each token of a delta          little-endian words of 32 bits: float32, and uint32 for ids

All are natural logarithms of the model's own probabilities: before temperature, penalties and bans. k is that of the
request, or the size of the vocabulary if that is less.
"""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

# OpenAI API reference, `top_logprobs`.
MAX_TOP_LOGPROBS = 20
_WORD = 4


class TokenLogprobs(NamedTuple):
    """Of one token: its own log-probability, and the most probable ids in its place, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def record_bytes(top_logprobs: int) -> int:
    """What the record of a token takes."""
    return _WORD + 2 * _WORD * top_logprobs


def record_size(records: bytes, count: int) -> int:
    """Bytes for each of the `count` tokens that these are the records of."""
    return len(records) // count if count else 0


def check_records(records: bytes, count: int) -> str | None:
    """What is wrong with the records of `count` tokens; None if nothing is."""
    size = record_size(records, count)
    if len(records) != size * count or (
        count and (size % (2 * _WORD) != _WORD or size > record_bytes(MAX_TOP_LOGPROBS))
    ):
        return f"{len(records)} bytes are no records of {count} tokens"
    words = array("f", records)
    for at in range(0, len(words), size // _WORD or 1):
        # Of a record every other word. This runs for every token; a sum is no number where one of its terms is none.
        logprobs = words[at : at + size // _WORD : 2]
        if not (max(logprobs) <= 0 and sum(logprobs) <= 0):
            return "a log-probability is over 0, or none"
    return None


def read_records(records: bytes, count: int) -> list[TokenLogprobs]:
    """The records of `count` tokens, which `check_records` has passed."""
    if not count:
        return []
    form = struct.Struct("<f" + "If" * (record_size(records, count) // (2 * _WORD)))
    return [
        TokenLogprobs(words[0], tuple(zip(words[1::2], words[2::2], strict=True)))
        for words in form.iter_unpack(records)
    ]

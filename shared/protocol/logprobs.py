"""Log-probabilities of tokens in step items, as packed bytes: records are cheap to cut and to join.

    record  = logprob | k times: token id, logprob      of the token, and of the k most probable tokens at its position
    records = record for each token of a delta          little-endian words of 32 bits: float32, and uint32 for ids

Log-probabilities are natural logarithms of the model's probabilities before temperature, penalties and bans. k is
`top_logprobs` of the request, or the size of the vocabulary if that is less.
"""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

# OpenAI API reference, `top_logprobs`.
MAX_TOP_LOGPROBS = 20
_WORD = 4


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and the most probable ids at its position, most probable first."""

    logprob: float
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

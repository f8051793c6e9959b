"""Log-probabilities of the tokens of a prompt, as packed bytes.

    record  = logprob | rank | k times: token id, logprob      little-endian words of 32 bits: float32, uint32 otherwise
    records = record for each token of the prompt after the first      the first token has no probability

The rank of a token is 1 plus the number of tokens that are more probable at its position. k is the number of most
probable tokens that the request asks for, or the size of the vocabulary if that is less.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from quire.shared.protocol.logprobs import MAX_TOP_LOGPROBS

_WORD = 4
# Records that are decoded at once.
_PORTION = 64


class PromptTokenLogprobs(NamedTuple):
    """Log-probability and rank of one token of a prompt, and the most probable ids at its position."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


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

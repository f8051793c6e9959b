"""Texts in which the continuation of a sequence is looked up: where do its last tokens occur, and what follows there?

A lookup finds the newest occurrences of the last NGRAM tokens, and takes the one with the longest match before it, at
most DEPTH tokens: what a suffix tree of that depth finds (arXiv 2411.04975), with a few numbers per token.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

NGRAM = 3
# Longest match that is told apart from longer ones.
DEPTH = 64
# Occurrences that are compared in a lookup, newest first.
CANDIDATES = 8
# Tokens that one call of `GrowingTokens.index` adds at most, so that no step waits for a long text.
INDEXED_AT_ONCE = 2048
# Bits of a token id in the keys of `FixedTokens`. Larger ids would give unequal n-grams equal keys.
TOKEN_BITS = 21
# Tokens that a store keeps at least; it keeps at most twice as many. Stores that are kept, one for each tenant that
# generated lately, and the bytes that each token takes: about 16 * 2 * 8,192 * 200 bytes = 50 MiB in all.
KEPT_TOKENS = 8192
KEPT_STORES = 16


class Match(NamedTuple):
    """The tokens before `end` in the text are the last `length` tokens of a sequence."""

    text: SequenceOf[int]
    end: int
    length: int


def longest_match(text: SequenceOf[int], ends: Iterable[int], tokens: SequenceOf[int]) -> Match | None:
    """Return the longest match of the last tokens with the text before one of `ends`, where NGRAM tokens match.

    The first one wins among equals. An end where the text ends is left out: nothing follows there.
    """
    best, best_end = 0, -1
    for end in ends:
        if end >= len(text):
            continue
        length, most = NGRAM, min(DEPTH, end, len(tokens))
        while length < most and text[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > best:
            best, best_end = length, end
            if best >= DEPTH:
                break
    return Match(text, best_end, best) if best else None


class GrowingTokens:
    """A list of tokens that grows, such as those of a sequence. Tokens before `start` are compared, but not found."""

    def __init__(self, tokens: list[int], start: int = 0) -> None:
        self.tokens = tokens
        # The end of the newest occurrence of an n-gram; and for each of these the end of the one before, or -1.
        self._newest: dict[tuple[int, int, int], int] = {}
        self._earlier: dict[int, int] = {}
        self._next = max(start, 0) + NGRAM

    def index(self) -> None:
        """Index the tokens that have been added since the last call, at most INDEXED_AT_ONCE."""
        tokens = self.tokens
        if self._next > len(tokens):
            return
        newest, earlier = self._newest, self._earlier
        stop = min(len(tokens) + 1, self._next + INDEXED_AT_ONCE)
        for end in range(self._next, stop):
            key = tokens[end - 3], tokens[end - 2], tokens[end - 1]
            if (before := newest.get(key)) is not None:
                earlier[end] = before
            newest[key] = end
        self._next = stop

    def find(self, tokens: SequenceOf[int]) -> Match | None:
        """Return the longest match of the last tokens."""
        if len(tokens) < NGRAM:
            return None
        end = self._newest.get((tokens[-3], tokens[-2], tokens[-1]), -1)
        if end < 0:
            return None
        ends = [end]
        while len(ends) < CANDIDATES and (end := self._earlier.get(end, -1)) >= 0:
            ends.append(end)
        return longest_match(self.tokens, ends, tokens)


class FixedTokens:
    """Tokens that do not change, such as a prompt, as sorted n-grams: 16 bytes per token."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        ids = np.array(tokens, dtype=np.int64)
        keys = (ids[:-2] << 2 * TOKEN_BITS) + (ids[1:-1] << TOKEN_BITS) + ids[2:]
        order = np.argsort(keys, kind="stable")
        # An array of Python, since bisect finds a single key in it several times faster than numpy does in its own.
        self._keys, self._ends = array("q", keys[order].tobytes()), (order + NGRAM).astype(np.int32)

    def find(self, tokens: SequenceOf[int]) -> Match | None:
        """Return the longest match of the last tokens."""
        if len(tokens) < NGRAM:
            return None
        key = (tokens[-3] << 2 * TOKEN_BITS) + (tokens[-2] << TOKEN_BITS) + tokens[-1]
        first = bisect_left(self._keys, key)
        if first == len(self._keys) or self._keys[first] != key:
            return None
        last = bisect_right(self._keys, key)
        return longest_match(self.tokens, self._ends[max(first, last - CANDIDATES) : last][::-1].tolist(), tokens)


class RecentTexts:
    """The outputs of the model for one tenant: the newest KEPT_TOKENS tokens, and some older ones."""

    def __init__(self) -> None:
        self._young = self._old = GrowingTokens([])

    def add(self, tokens: SequenceOf[int]) -> None:
        """Add an output."""
        if len(self._young.tokens) >= KEPT_TOKENS:
            self._old, self._young = self._young, GrowingTokens([])
        self._young.tokens.extend(tokens[-KEPT_TOKENS:])

    def find(self, tokens: SequenceOf[int]) -> Match | None:
        """Return the longest match of the last tokens; a newer text wins among equals."""
        self._young.index()
        found, other = self._young.find(tokens), None
        if self._old is not self._young:
            self._old.index()
            other = self._old.find(tokens)
        return max((match for match in (found, other) if match), key=lambda match: match.length, default=None)


class TextStores:
    """The recent texts by tenant. A tenant is found by a key that no other tenant has, and sees no other texts."""

    def __init__(self) -> None:
        self._stores: OrderedDict[bytes, RecentTexts] = OrderedDict()

    def of(self, key: bytes) -> RecentTexts:
        """Return the texts of a tenant. The tenant that was asked for least lately is forgotten if there are more than
        KEPT_STORES."""
        store = self._stores.get(key)
        if store is None:
            store = self._stores[key] = RecentTexts()
            if len(self._stores) > KEPT_STORES:
                self._stores.popitem(last=False)
        self._stores.move_to_end(key)
        return store

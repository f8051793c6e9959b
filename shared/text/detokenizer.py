"""Incremental detokenization: token ids to text deltas, whose concatenation is the whole text.

A tokenizer may need several tokens for one character, and may decode a token differently at the start of a text than
inside it. So each step decodes a short window twice, with and without the new token, and emits the difference. While
the difference ends in an incomplete character, nothing is emitted. The concatenation of all deltas and of `flush()`
equals the decoding of all ids at once, however the ids are split into calls. One exception: tokenizers with byte
fallback decode a run of bytes that is not UTF-8 to U+FFFD as a whole; here the valid beginning of such a run is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
# An incomplete UTF-8 character has at most three bytes; decoders return one U+FFFD for each of them, or one for all.
MAX_INCOMPLETE = 3
# A window of this many tokens without a complete character at its end holds bytes that are not UTF-8. The text of such
# a window is emitted, so that the cost of decoding does not grow with the length of the text.
MAX_WINDOW_TOKENS = 256
# A run of this many tokens without any text consists of special tokens. Such a run does not affect the following text
# and is dropped.
MAX_SILENT_TOKENS = 16


class TokenDecoder(Protocol):
    """The methods of `tokenizers.Tokenizer` that detokenization needs."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any: ...


def context_of(tokenizer: TokenDecoder) -> tuple[int, ...]:
    """Return tokens to decode before a completion, so that it decodes as a continuation of a prompt.

    Without them SentencePiece drops the space before the first word, which separates a prompt from its continuation.
    """
    return tuple(tokenizer.encode("a", add_special_tokens=False).ids)


def drops_first_space(tokenizer: TokenDecoder) -> bool:
    """Return whether tokens that begin with a space lose it when they are decoded as a text of their own."""
    first, both = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", "a a"))
    second = both[len(first) :]
    return tokenizer.decode(both) != tokenizer.decode(first) + tokenizer.decode(second)


class IncrementalDetokenizer:
    """The text of one stream of token ids.

         ids:  ... | context | window: decoded, the end may change |
                   ^ _prefix ^ _read                               ^ len(_ids)

    The first `_emitted` characters of the window's text have been emitted.
    context: tokens before the stream; their text is decoded with the stream and not emitted (`context_of`).
    """

    def __init__(self, tokenizer: TokenDecoder, context: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = list(context)
        self._prefix = 0
        self._read = len(context)
        self._emitted = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens and return the text that later tokens cannot change."""
        # This runs for every token, nearly always with one.
        if len(token_ids) == 1:
            self._ids.append(token_ids[0])
            return self._advance(final=False)
        text = ""
        for token_id in token_ids:
            self._ids.append(token_id)
            text += self._advance(final=False)
        return text

    def flush(self) -> str:
        """Return the rest of the text at the end of the stream; an incomplete character becomes U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        ids, decode, skips = self._ids, self._tokenizer.decode, self._skip_special_tokens
        context = decode(ids[self._prefix : self._read], skip_special_tokens=skips)
        whole = decode(ids[self._prefix :], skip_special_tokens=skips)
        if whole.startswith(context) and len(whole) > len(context) and not whole.endswith(REPLACEMENT):
            # The common case: the window ends in a complete character.
            text = whole[len(context) + self._emitted :]
            self._prefix, self._read, self._emitted = self._read, len(ids), 0
            return text
        held = not final and len(self._ids) - self._read < MAX_WINDOW_TOKENS
        if whole.startswith(context) or REPLACEMENT not in whole:
            window = whole[len(context) :]
        elif held and whole.endswith(REPLACEMENT):
            # Byte fallback decodes a run of bytes as a whole: until it is complete, its first characters are missing
            # too.
            return ""
        else:
            window = self._decode(self._ids[self._read :])
        incomplete = 0
        while incomplete < MAX_INCOMPLETE and window[: len(window) - incomplete].endswith(REPLACEMENT):
            incomplete += 1
        if incomplete and held:
            text = window[self._emitted : len(window) - incomplete]
            self._emitted += len(text)
            return text
        text = window[self._emitted :]
        if not window and len(self._ids) - self._read >= MAX_SILENT_TOKENS:
            del self._ids[self._read :]
        if window:  # special tokens without text stay in the window, with the context before them
            self._prefix, self._read, self._emitted = self._read, len(self._ids), 0
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

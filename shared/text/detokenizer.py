"""Token ids to text, a piece at a time, with the guarantee that the pieces are the whole.

A tokenizer may need several tokens for one character, and may decode a token differently at the start of a text than
inside it. So each step decodes a short window twice, with and without the new token, and emits the difference; it emits
nothing while the difference ends in an incomplete character. The concatenation of all pieces and of `flush()` equals
the decoding of all ids at once, and does not depend on the portions in which they come. One exception: tokenizers with
byte fallback decode a run of bytes that is not UTF-8 to U+FFFD as a whole; here its valid beginning stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
# The first bytes of a character of UTF-8 are at most three, and decoders show each of them as one U+FFFD or all as one.
MAX_INCOMPLETE = 3
# A window that has not ended in a whole character after so many tokens holds bytes that are not UTF-8: let go of it, so
# that its decoding does not grow with the length of the text.
MAX_WINDOW_TOKENS = 256
# So many tokens without any text are special ones: they change nothing of what follows and need not be kept.
MAX_SILENT_TOKENS = 16


class TokenDecoder(Protocol):
    """What is needed of `tokenizers.Tokenizer`."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any: ...


def context_of(tokenizer: TokenDecoder) -> tuple[int, ...]:
    """Tokens that stand for a prompt: behind them others decode as they go on in a text. SentencePiece drops the space
    in front of the first word of all, and with it the one between a prompt and its continuation."""
    return tuple(tokenizer.encode("a", add_special_tokens=False).ids)


def drops_first_space(tokenizer: TokenDecoder) -> bool:
    """Whether tokens that begin with a space lose it where they are a text of their own."""
    first, both = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", "a a"))
    second = both[len(first) :]
    return tokenizer.decode(both) != tokenizer.decode(first) + tokenizer.decode(second)


class IncrementalDetokenizer:
    """The text of one stream of token ids.

         ids:  ... | context | window: decoded, not all of it certain |
                   ^ _prefix ^ _read                                  ^ len(_ids)

    `_emitted` characters of the window's text are out already. What goes on in a text is given its first context.
    """

    def __init__(self, tokenizer: TokenDecoder, context: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = list(context)
        self._prefix = 0
        self._read = len(context)
        self._emitted = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Append tokens and return the text that is now certain."""
        text = ""
        for token_id in token_ids:
            self._ids.append(token_id)
            text += self._advance(final=False)
        return text

    def flush(self) -> str:
        """The rest, at the end of the stream: an incomplete character comes out as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        context = self._decode(self._ids[self._prefix : self._read])
        whole = self._decode(self._ids[self._prefix :])
        if whole.startswith(context) and len(whole) > len(context) and not whole.endswith(REPLACEMENT):
            # As it nearly always is: all of the window is certain.
            text = whole[len(context) + self._emitted :]
            self._prefix, self._read, self._emitted = self._read, len(self._ids), 0
            return text
        held = not final and len(self._ids) - self._read < MAX_WINDOW_TOKENS
        if whole.startswith(context) or REPLACEMENT not in whole:
            window = whole[len(context) :]
        elif held and whole.endswith(REPLACEMENT):
            # Byte fallback decodes a run of bytes as one: until it is complete, the characters before it are lost too.
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
        if window:  # a special token has no text; it stays in the window, and with it the context before it
            self._prefix, self._read, self._emitted = self._read, len(self._ids), 0
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

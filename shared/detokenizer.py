"""Token ids to text, a piece at a time, with the guarantee that the pieces are the whole.

A tokenizer may need several tokens for one character, and may decode a token differently at the start of a text than
inside it. So each step decodes a short window twice, with and without the new token, and emits the difference; it emits
nothing while the difference ends in an incomplete character. The concatenation of all pieces and of `flush()` equals
the decoding of all ids at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

REPLACEMENT = "\ufffd"
# A character of UTF-8 has at most four bytes. A window that still ends in U+FFFD after so many tokens holds bytes that are
# not UTF-8, and waiting longer would not mend them.
MAX_PENDING_TOKENS = 8


class Decoder(Protocol):
    """What is needed of `tokenizers.Tokenizer`."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """The text of one stream of token ids."""

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._prefix = 0  # the window starts here: tokens that give the decoder its context
        self._read = 0  # the text of all tokens before this one has been emitted

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
        known = self._decode(self._ids[self._prefix : self._read])
        whole = self._decode(self._ids[self._prefix :])
        if len(whole) <= len(known) and not final:
            return ""
        incomplete = whole.endswith(REPLACEMENT) and len(self._ids) - self._read < MAX_PENDING_TOKENS
        if incomplete and not final:
            return ""
        self._prefix = self._read
        self._read = len(self._ids)
        return whole[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

"""Token ids for an upstream's text, for servers that return none.

The ids need not be those that the upstream drew. They decode to the same text, which is what clients get and what a
continuation is computed from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from quire.shared.text.detokenizer import REPLACEMENT, context_of

# Tokens before a text with which it is decoded, at least.
WINDOW = 8


class TextTokenizer:
    """Tokenizes the text of one answer as it grows. output: the tokens of the answer so far."""

    def __init__(self, tokenizer: Tokenizer, output: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        before = [*context_of(tokenizer), *output]
        start = max(0, len(before) - WINDOW)
        while start and self._decode(before[start:]).startswith(REPLACEMENT):  # inside of a character
            start -= 1
        # The last tokens, in pieces that begin and end between two characters.
        self._pieces: deque[Sequence[int]] = deque([before[start:]])

    def push(self, text: str) -> tuple[int, ...]:
        """Return tokens whose text, after those before, is `text`.

        If the tokenizer has no such tokens, which happens to texts that contain a special token's, those of the text
        alone.
        """
        ids = next(filter(lambda ids: self.says(ids, text), self._attempts(text)), None)
        return self.take(self._encode(text) if ids is None else ids)

    def says(self, ids: Sequence[int], text: str) -> bool:
        """Return whether these tokens, after those before, have this text."""
        before = self._before
        return self._decode([*before, *ids]) == self._decode(before) + text

    def take(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Note and return tokens of the answer."""
        self._pieces.append(ids)
        while sum(map(len, self._pieces)) - len(self._pieces[0]) >= WINDOW:
            self._pieces.popleft()
        return tuple(ids)

    @property
    def _before(self) -> list[int]:
        return [token for piece in self._pieces for token in piece]

    def _attempts(self, text: str) -> Iterator[list[int]]:
        yield self._encode(text)
        # Some tokenizers put a space before a text of its own: tokenize it behind the text before.
        before = self._decode(self._before)
        first, both = self._encode(before), self._encode(before + text)
        if both[: len(first)] == first:
            yield both[len(first) :]
        yield [token for character in text for token in self._character(character)]

    def _character(self, character: str) -> list[int]:
        """Return the token of a character, or those of its bytes; the tokens of a text of its own as a last resort."""
        find = self._tokenizer.token_to_id
        whole = find("▁" if character == " " else character)
        if whole is not None:
            return [whole]
        parts = [find(f"<0x{byte:02X}>") for byte in character.encode()]
        known = [part for part in parts if part is not None]
        return known if len(known) == len(parts) else self._encode(character)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

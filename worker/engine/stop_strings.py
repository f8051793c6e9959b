"""Finds the stop strings of one sequence."""

from __future__ import annotations

from quire.shared.text.detokenizer import IncrementalDetokenizer, TokenDecoder, context_of
from quire.shared.text.stop_strings import StopStringFilter


class StopStringMatcher:
    """Looks for the stop strings of one sequence in its text, in the same way as the gateway does."""

    def __init__(self, tokenizer: TokenDecoder, stop: tuple[str, ...], skip_special_tokens: bool = True) -> None:
        self._text = IncrementalDetokenizer(tokenizer, context_of(tokenizer), skip_special_tokens)
        self._filter = StopStringFilter(stop)

    def push(self, token_ids: list[int]) -> str | None:
        """Add tokens. Returns the stop string that their text completes, if any."""
        self._filter.push(self._text.push(token_ids))
        return self._filter.matched

"""Prompts of an asked length in tokens: random token ids, or random words whose number is counted or calibrated.

The length is that which the server counts (`usage.prompt_tokens`): what a chat template adds is part of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# Frequent and short, so that most tokenizers have a token of its own for each.
_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were her all she there would their we him been has when who will more no if out so said "
    "what up its about into than them can only other new some could time these two may then do first any my "
    "now such like our over man me even most made after also did many before must through back years where "
    "much your way well down should because each just those people how too little state good very make world "
    "still own see men work long get here between both life being under never day same another know while last "
    "might us great old year off come since against go came right used take three"
)
WORDS = _TEXT.split()
# Ids below are special or single bytes in most vocabularies.
FIRST_ID = 256
_TRIES = 24


class Prompts(Protocol):
    """Makes prompts; `how` says in words what they are."""

    @property
    def how(self) -> str: ...

    def make(self, tokens: int, draw: random.Random) -> str | list[int]:
        """A prompt of so many tokens, or nearly, of which the first are shared by all."""
        ...


class IdPrompts:
    """Random token ids below `vocab_size`; exact. The first `shared` ids are the same in every prompt."""

    def __init__(self, vocab_size: int, shared: int, seed: int) -> None:
        self._ids = range(min(FIRST_ID, vocab_size // 4), vocab_size)
        self._prefix = random.Random(f"prefix {seed}").choices(self._ids, k=shared)
        self.how = f"random token ids from {self._ids.start} to {vocab_size - 1}, exact"

    def make(self, tokens: int, draw: random.Random) -> list[int]:
        prefix = self._prefix[:tokens]
        return prefix + draw.choices(self._ids, k=tokens - len(prefix))


@dataclass(frozen=True)
class WordPrompts:
    """Random words. The number of tokens is `fixed` (template, first token) and that of the text: counted with
    `count` where there is a tokenizer, else `per_word` for each word."""

    shared: int
    seed: int
    how: str
    fixed: float
    per_word: float
    count: Callable[[str], int] | None = None

    def make(self, tokens: int, draw: random.Random) -> str:
        wanted = max(1, round(tokens - self.fixed))
        length = max(1, round(wanted / self.per_word))
        prefix = random.Random(f"prefix {self.seed}").choices(
            WORDS, k=min(length, round((self.shared - self.fixed) / self.per_word)) if self.shared else 0
        )
        words = prefix + draw.choices(WORDS, k=length - len(prefix))
        if self.count is None:
            return " ".join(words)
        for _ in range(_TRIES):
            missing = wanted - self.count(" ".join(words))
            if not missing:
                break
            if missing < 0:
                del words[max(0, len(words) + missing) :]
            words += draw.choices(WORDS, k=max(missing, not words))
        return " ".join(words)

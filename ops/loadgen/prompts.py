"""Prompts of a given length in tokens: random token ids, or random words with a counted or estimated length.

The length is the server's count (`usage.prompt_tokens`), which includes the tokens of a chat template.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# Frequent, short words: most tokenizers have a single token for each.
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
# Smaller ids are special tokens or single bytes in most vocabularies.
FIRST_ID = 256
_TRIES = 24


class Prompts(Protocol):
    """Makes prompts. `how` describes them in words."""

    @property
    def how(self) -> str: ...

    def make(self, tokens: int, draw: random.Random) -> str | list[int]:
        """Return a prompt of about `tokens` tokens. All prompts begin with the same shared prefix."""
        ...


class IdPrompts:
    """Random token ids below `vocab_size`, of an exact number. All prompts share the first `shared` ids."""

    def __init__(self, vocab_size: int, shared: int, seed: int) -> None:
        self._ids = range(min(FIRST_ID, vocab_size // 4), vocab_size)
        self._prefix = random.Random(f"prefix {seed}").choices(self._ids, k=shared)
        self.how = f"random token ids from {self._ids.start} to {vocab_size - 1}, exact"

    def make(self, tokens: int, draw: random.Random) -> list[int]:
        prefix = self._prefix[:tokens]
        return prefix + draw.choices(self._ids, k=tokens - len(prefix))


@dataclass(frozen=True)
class WordPrompts:
    """Random words. The prompt has `fixed` tokens (template, first token) plus those of the text.

    count: the tokenizer, which counts the tokens of a text. Without it each word counts as `per_word` tokens.
    """

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

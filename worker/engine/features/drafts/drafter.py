"""The drafter of one sequence: what comes next, and how probable is it that the model says so?

A drafter follows a text for as long as the sequence repeats it, and looks for another one at the first difference. If
it finds none, it takes the difference for one changed token, and follows the text after it. It learns from every token,
drafted or not, how often a text of its kind is right. The probabilities are those of the sequence alone, so no other
request has an effect on them.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from quire.worker.engine.features.drafts.texts import FixedTokens, GrowingTokens, Match, RecentTexts
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.speculation import GRAMMAR, OWN, PREDICTION, TENANT

RESUME = -1  # in place of the least length of a match
# Probabilities of the first token after a match and of each later one, before anything is learnt: by the source, and
# for matches of at least this many tokens.
PREDICTED = (0.8, 0.95)
RESUMED = (0.5, 0.9)
PRIORS = ((16, (0.85, 0.95)), (8, (0.75, 0.9)), (5, (0.6, 0.85)), (0, (0.35, 0.8)))
# Tokens that a sequence has repeated before its difference from the text is taken for one changed token.
LEAST_REPEATED = 4
# Tokens of a sequence, or steps of an engine, in a row without a text to follow, after which one is looked for at every
# RARELY-th only.
PATIENCE = 32
RARELY = 4
# Weight of the newest token in a probability.
WEIGHT = 0.15
# A later token whose draft survives with less is not drafted.
LEAST_SURVIVAL = 0.05


class Draft(NamedTuple):
    """Tokens that may come next, and for each the probability that it and all before it are accepted."""

    source: str
    token_ids: SequenceOf[int]
    survival: list[float]


class Drafter:
    """Drafts for one sequence.

    prompt: of the sequence. prediction: tokens that the caller expects; None without. recent: texts of the tenant.
    """

    __slots__ = (
        "_at",
        "_depth",
        "_known",
        "_left",
        "_misses",
        "_output",
        "_prediction",
        "_prompt",
        "_rates",
        "_recent",
        "_source",
        "_text",
    )

    def __init__(
        self, sequence: Sequence, prompt: FixedTokens, prediction: FixedTokens | None, recent: RecentTexts
    ) -> None:
        self._prompt, self._prediction, self._recent = prompt, prediction, recent
        start = sequence.num_prompt_tokens
        self._output = GrowingTokens(sequence.token_ids, start)
        # The text that the sequence repeats, the index of its next token there, its source, and the number of tokens
        # that it has repeated since it was found.
        self._text: SequenceOf[int] | None = None
        self._at, self._source, self._depth = 0, (OWN, 0), 0
        # The text, the index of its next token and the source, after a difference that may be one changed token.
        self._left: tuple[SequenceOf[int], int, str] | None = None
        self._known = start
        self._misses = 0
        self._rates: dict[tuple[str, int], list[float]] = {}
        if prediction is not None:
            self._follow(Match(prediction.tokens, 0, 0), PREDICTION)

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """Return a draft of at most `most` tokens that may follow the known tokens of the sequence."""
        tokens = sequence.token_ids
        if self._text is not None:
            self._learn(tokens)
        self._known = len(tokens)
        if sequence.matcher is not None and (forced := sequence.matcher.forced()):
            return Draft(GRAMMAR, forced[:most], [1.0] * min(most, len(forced)))
        if self._text is None:
            if self._misses >= PATIENCE and len(tokens) % RARELY:
                return None
            self._misses += 1
            self._look_up(tokens)
        if self._text is None:
            return None
        self._misses = 0
        token_ids = self._text[self._at : self._at + most]
        if not token_ids:
            self._text = None
            return None
        first, later = self._rates[self._source]
        survival = [later if self._depth else first]
        while len(survival) < len(token_ids) and (next_survival := survival[-1] * later) > LEAST_SURVIVAL:
            survival.append(next_survival)
        return Draft(self._source[0], token_ids, survival)

    def _learn(self, tokens: list[int]) -> None:
        """Compare the tokens since the last call with the text that the sequence was to repeat."""
        text, rates = self._text, self._rates[self._source]
        assert text is not None
        for token in tokens[self._known :]:
            is_right = self._at < len(text) and text[self._at] == token
            place = min(self._depth, 1)
            rates[place] += WEIGHT * (is_right - rates[place])
            if not is_right:
                if self._depth >= LEAST_REPEATED:
                    self._left = text, self._at + 1, self._source[0]
                self._text = None
                break
            self._at += 1
            self._depth += 1

    def _look_up(self, tokens: list[int]) -> None:
        """Look for a text to follow, in the order of the sources; a longer match wins."""
        self._output.index()
        best, source = None, OWN
        for text, name in (
            (self._prediction, PREDICTION),
            (self._output, OWN),
            (self._prompt, OWN),
            (self._recent, TENANT),
        ):
            match = text.find(tokens) if text is not None else None
            if match is not None and (best is None or match.length > best.length):
                best, source = match, name
        left, self._left = self._left, None
        if best is not None:
            self._follow(best, source)
        elif left is not None:
            self._text, self._at, self._source, self._depth = left[0], left[1], (left[2], RESUME), 0
            self._rates.setdefault(self._source, [*RESUMED])

    def _follow(self, match: Match, source: str) -> None:
        self._text, self._at, self._depth = match.text, match.end, 0
        if source == PREDICTION:
            self._source, prior = (source, 0), PREDICTED
        else:
            least, prior = next((least, prior) for least, prior in PRIORS if match.length >= least)
            self._source = source, least
        self._rates.setdefault(self._source, [*prior])

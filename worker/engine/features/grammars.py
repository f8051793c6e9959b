"""Grammars of answers: which tokens are allowed next in each sequence.

The allowed tokens depend on the tokens so far and nothing else. So an answer that is interrupted and resumed continues
as it would have without the interruption.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.sequence import DEAD_END

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

# Maximum number of grammars whose matchers or errors are cached.
KEPT = 64


class Matcher:
    """The state of one sequence in its grammar."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._words)

    def allowed(self) -> np.ndarray:
        """Return the allowed next tokens as a bit mask: int32 [words], lowest bit first.

        If that fails, `error` is set and the mask has no meaning.
        """
        mask = np.zeros(self._words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask

    def forced(self) -> list[int]:
        """Return the tokens that any answer continues with, as far as the tokenizer would write them in one way."""
        return [] if self._matcher.is_error() else self._matcher.compute_ff_tokens()

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens; an end token may only be the last."""
        for token_id in token_ids:  # one by one: consume_tokens would refuse an end token
            self._matcher.consume_token(token_id)

    @property
    def error(self) -> str | None:
        """The reason why no token is allowed any more, as one word, or None. The text of llguidance quotes answers."""
        return self._matcher.stop_reason() if self._matcher.is_error() else None


class Grammars:
    """Matchers for the grammars of requests, cached by grammar. Safe to use from several threads.

    tokenizer: that of the model. Without it requests with a grammar are refused.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._matchers: OrderedDict[str, Matcher | str] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._why_none = "this worker has no tokenizer"
        # Some configurations name end tokens that the model does not have.
        eos = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        if tokenizer is None or not eos:
            self._why_none = self._why_none if eos else "the model has no end token, with which such an answer ends"
            return
        size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        self._words = -(-size // 32)
        try:
            # Imported here, because an engine without grammars works without the package.
            from llguidance import LLTokenizer

            from quire.shared.text.grammar import special_tokens
            from quire.shared.text.panics import faults_as

            with faults_as(ValueError):
                self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=eos)
            self._special_tokens = special_tokens(tokenizer)
        except ImportError:
            self._why_none = "the package llguidance is not installed"
        except ValueError as error:
            log.warning("answers cannot be made to follow a grammar: %s", error)
            self._why_none = f"the tokenizer of the model is of a kind that allows none ({str(error)[:200]})"

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of an answer. Raises RequestRefused if the grammar cannot be followed.

        The first call for a grammar can last a second; later calls for the same grammar last microseconds.
        """
        if self._tokenizer is None:
            raise RequestRefused(f"an answer cannot be made to follow a grammar: {self._why_none}")
        with self._lock:
            if (matcher := self._matchers.get(grammar)) is not None:
                self._matchers.move_to_end(grammar)
        if matcher is None:
            # Outside the lock, so that the engine's thread can get another matcher meanwhile.
            matcher = self._make(grammar)
            with self._lock:
                self._matchers[grammar] = matcher
                if len(self._matchers) > KEPT:
                    self._matchers.popitem(last=False)
        if isinstance(matcher, str):
            raise RequestRefused(matcher)
        return matcher.copy()

    def resume(self, sampling: SamplingParams, outputs: dict[int, list[int]]) -> dict[int, Matcher]:
        """Return a matcher for each choice of a request, advanced by its output so far; empty without a grammar.

        outputs: tokens of an earlier attempt, by choice. Raises RequestRefused.
        """
        if not sampling.grammar:
            return {}
        if sampling.beam_width:
            raise RequestRefused("a beam search does not follow a grammar")
        matchers = {choice: self.matcher(sampling.grammar) for choice in range(sampling.num_sequences)}
        for choice, token_ids in outputs.items():
            matchers[choice].consume(token_ids)
            if error := matchers[choice].error:
                raise RequestRefused(f"{DEAD_END}: {error}")
        return matchers

    def _make(self, text: str) -> Matcher | str:
        """Return a matcher, or the reason why the grammar has no matcher."""
        from quire.shared.text import grammar
        from quire.shared.text.grammar_error import GrammarError
        from quire.shared.text.panics import faults_as

        assert self._tokenizer is not None
        try:
            with faults_as(GrammarError):
                made = grammar.matcher(text, self._tokenizer, self._special_tokens)
        except GrammarError as error:
            return f"the grammar cannot be followed: {error}"
        return Matcher(made, self._words)

"""Answers that follow a JSON schema: which tokens may come next, kept for each sequence.

What may come next follows from the tokens alone, so an answer goes on behind any interruption as it would have without.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.worker.engine.limits import RequestRefused

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

# Schemas whose matchers, or why they have none, are kept ready.
KEPT = 64


class Matcher:
    """Where one sequence is in its grammar."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._words)

    def allowed(self) -> np.ndarray:
        """The tokens that may come next: int32 [words], a bit for each token, the lowest first.

        Where that fails `error` says so, and what is allowed has no meaning.
        """
        mask = np.zeros(self._words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask

    def consume(self, token_ids: Sequence[int]) -> None:
        """These tokens have come; an end token is the last."""
        for token_id in token_ids:  # not all at once: there an end token would be an error
            self._matcher.consume_token(token_id)

    @property
    def error(self) -> str | None:
        """Why nothing can come next any more: a word. What llguidance says beside it has what the answer said."""
        return self._matcher.stop_reason() if self._matcher.is_error() else None


class Grammars:
    """Matchers for the schemas of requests. Threads may ask for them at the same time.

    tokenizer: a `tokenizers.Tokenizer`, whose tokens the model draws; None where there is none.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
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
            # Imported where it is needed: an engine for anything else works without the package.
            from llguidance import LLTokenizer

            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=eos)
        except ImportError:
            self._why_none = "the package llguidance is not installed"
        except ValueError as error:
            log.warning("answers cannot be made to follow a JSON schema: %s", error)
            self._why_none = f"the tokenizer of the model is of a kind that allows none ({str(error)[:200]})"

    def matcher(self, schema: str) -> Matcher:
        """A matcher at the beginning of an answer. Raises RequestRefused.

        It takes up to a second the first time that a schema is asked for, and microseconds later.
        """
        if self._tokenizer is None:
            raise RequestRefused(f"an answer cannot be made to follow a JSON schema: {self._why_none}")
        with self._lock:
            if (found := self._matchers.get(schema)) is not None:
                self._matchers.move_to_end(schema)
        if found is None:
            # Not under the lock: the engine's thread may ask for another one meanwhile.
            found = self._make(schema)
            with self._lock:
                self._matchers[schema] = found
                if len(self._matchers) > KEPT:
                    self._matchers.popitem(last=False)
        if isinstance(found, str):
            raise RequestRefused(found)
        return found.copy()

    def _make(self, schema: str) -> Matcher | str:
        """A matcher, or why there is none."""
        from quire.shared.text import json_schema

        assert self._tokenizer is not None
        try:
            made = json_schema.matcher(schema, self._tokenizer)
        except json_schema.SchemaError as error:
            return f"the JSON schema cannot be followed: {error}"
        return Matcher(made, self._words)

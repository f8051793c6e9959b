"""The prompt of a request as its answer shows it: text, token ids, log-probabilities.

All of it comes from the worker's report in the output log, so every gateway shows the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterator
from functools import cached_property

from tokenizers import Tokenizer

from quire.gateway.model.token_texts import TokenTexts
from quire.shared.protocol.logprobs import PromptTokenLogprobs
from quire.shared.protocol.messages import PromptReport


class PromptText:
    """One prompt. `text` is empty unless the call echoes its prompts."""

    def __init__(
        self,
        report: PromptReport,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        silent: Collection[int],
        drops_first_space: bool,
        is_echoed: bool,
    ) -> None:
        """`silent`: tokens without text. `drops_first_space`: whether a text loses the space before its first word."""
        self.token_ids = report.token_ids
        self._report = report
        self._texts = texts
        self._silent = silent
        self._drops_first_space = drops_first_space
        self.text = tokenizer.decode(list(self.token_ids), skip_special_tokens=bool(silent)) if is_echoed else ""

    @property
    def is_scored(self) -> bool:
        return self._report.records is not None

    def scores(self) -> Iterator[PromptTokenLogprobs | None]:
        """Yield the log-probabilities of each token, lazily; None for the first token."""
        return self._report.scores()

    @cached_property
    def offsets(self) -> list[int]:
        """The number of characters of `text` before each token, and its length at the end.

        A token within a character begins where the character does. The bytes of the tokens are counted, because to
        decode token by token would take a hundred times as long.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets, length = [0], 0
        for token_id in self.token_ids:
            if token_id not in self._silent:
                length += len(decoder.decode(self._texts.bytes_of(token_id)))
            offsets.append(length)
        # Some tokenizers write a space before the first word, which the text does not have.
        surplus = int(self._drops_first_space and length > len(self.text))
        last = len(self.text)
        return [min(max(0, offset - surplus), last) for offset in offsets[:-1]] + [last]

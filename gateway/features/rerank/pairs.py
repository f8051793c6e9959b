"""The prompts of pairs of texts: rendered, cut to their bounds and tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from quire.gateway.errors.api_errors import ApiError, refused, too_long
from quire.gateway.model.renderer import CHARACTERS_PER_TOKEN
from quire.gateway.model.scoring import Scoring
from quire.shared.text.chat_template import TemplateFailure
from quire.shared.text.control_tokens import pieces
from quire.shared.text.panics import faults_as

# The prompts of a call have at most this many characters together: each repeats the query and the instruction.
MAX_CHARACTERS = 16 * 1024 * 1024
# Attempts at cutting a document so that its prompt has the wanted length: texts around a cut may join to other tokens.
ATTEMPTS = 4


class TextPair(NamedTuple):
    """A query and a document, each with its name for errors."""

    query_name: str
    query: str
    name: str
    document: str


@dataclass(frozen=True, slots=True)
class PairTokenizer:
    """Makes the prompts of pairs, in a thread.

    context: the longest prompt in tokens. kept: the longest prompt, to which documents are cut; 0: longer ones are
    refused. most_query, most_document: to which each is cut before, in tokens; 0: not.
    """

    tokenizer: Tokenizer
    scoring: Scoring
    context: int
    instruction: str = ""
    kept: int = 0
    most_query: int = 0
    most_document: int = 0

    def prompts(self, pairs: Sequence[TextPair]) -> list[tuple[int, ...]]:
        """Return the token ids of each pair. Raises InvalidRequest."""
        if (count := self.characters(pairs)) > MAX_CHARACTERS:
            raise refused(
                pairs[0].name.partition("[")[0],
                f"The prompts have {count} characters, since each repeats its query and the instruction, and one call "
                f"may have {MAX_CHARACTERS}; send the documents in several calls.",
            )
        pairs, found = self._bounded(pairs), []
        for pair, ids in zip(pairs, self._encoded(pairs), strict=True):
            kept = self._cut(pair, ids) if len(ids) > (self.kept or self.context) else ids
            if not kept:
                raise refused(pair.name, f"{pair.name} makes an empty prompt.", code="empty_prompt")
            found.append(tuple(kept))
        return found

    def characters(self, pairs: Sequence[TextPair]) -> int:
        """Return the number of characters of the texts in all prompts."""
        return sum(len(pair.query) + len(pair.document) + len(self.instruction) for pair in pairs)

    def _bounded(self, pairs: Sequence[TextPair]) -> list[TextPair]:
        """Cut the texts to `most_query` and `most_document` tokens."""
        queries: dict[str, str] = {}
        cut = []
        for pair in pairs:
            if self.most_query and pair.query not in queries:
                queries[pair.query] = self._shortened(pair.query, self.most_query)
            document = self._shortened(pair.document, self.most_document) if self.most_document else pair.document
            cut.append(pair._replace(query=queries.get(pair.query, pair.query), document=document))
        return cut

    def _shortened(self, text: str, most: int) -> str:
        """Return the longest beginning of a text that has at most `most` tokens by itself."""
        text = text[: CHARACTERS_PER_TOKEN * most]
        return text[: _end_of(self._alone(text), most)]

    def _alone(self, text: str) -> Encoding:
        with faults_as(_fault):
            return self.tokenizer.encode(text, add_special_tokens=False)

    def _encoded(self, pairs: Sequence[TextPair]) -> list[list[int]]:
        """Return the token ids of pairs as they are. Raises InvalidRequest."""
        if self.scoring.template is None:
            with faults_as(_fault):
                encodings = self.tokenizer.encode_batch_fast([(pair.query, pair.document) for pair in pairs])
            return [encoding.ids for encoding in encodings]
        rendered = [self._rendered(pair) for pair in pairs]
        whole = [parts[0] for parts in rendered if len(parts) == 1]
        with faults_as(_fault):
            plain = iter(self.tokenizer.encode_batch_fast(whole, add_special_tokens=False))
        return [next(plain).ids if len(parts) == 1 else self._joined(parts) for parts in rendered]

    def _joined(self, parts: Sequence[str]) -> list[int]:
        return [token_id for part in parts for token_id in self._alone(part).ids]

    def _rendered(self, pair: TextPair) -> list[str]:
        """Return the prompt in pieces, divided within texts that look like control tokens. Raises InvalidRequest."""
        texts = [pair.query, pair.document, self.instruction]
        mark = ""
        if self.scoring.control_tokens is not None:
            try:
                _, texts, mark = self.scoring.control_tokens.mark([], texts)
            except ValueError as error:
                raise refused(pair.name, f"The texts of {pair.name} and its query {error}.") from error
        try:
            return pieces(self.scoring.prompt(*texts), mark)
        except TemplateFailure as error:
            what = f"The template refuses {pair.name} with {pair.query_name}: {str(error)[:500].rstrip('.')}."
            raise refused(pair.name, what, code="template_error") from error

    def _cut(self, pair: TextPair, ids: list[int]) -> list[int]:
        """Return the prompt with as much of the document as fits. Raises InvalidRequest."""
        if not self.kept:
            raise self._too_long(pair, len(ids), "Shorten it, or give truncate_prompt_tokens or max_tokens_per_doc.")
        encoding, cut = self._alone(pair.document), ids
        left = len(encoding.ids)
        for _ in range(ATTEMPTS):
            left -= len(cut) - self.kept
            if left < 1:
                break
            [cut] = self._encoded([pair._replace(document=pair.document[: _end_of(encoding, left)])])
            if len(cut) <= self.kept:
                return cut
        raise self._too_long(pair, len(ids), f"The rest leaves no room for it; shorten {pair.query_name}.")

    def _too_long(self, pair: TextPair, length: int, remedy: str) -> ApiError:
        limit = self.kept or self.context
        return too_long(pair.name, limit, length, f"{pair.name} makes a prompt of {length} tokens", remedy)


def _fault(reason: str) -> ApiError:
    return refused("documents", f"The tokenizer fails at these texts: {reason}. Change them.")


def _end_of(encoding: Encoding, count: int) -> int:
    """Return the number of characters that the first `count` tokens have. A character is not divided."""
    if count >= len(encoding.ids):
        return encoding.offsets[-1][1] if encoding.offsets else 0
    return min(encoding.offsets[count - 1][1], encoding.offsets[count][0])

"""POST /v1/rerank and /v1/score: the scores of pairs of texts, each a request of its own in the queue.

A request asks for logits after its prompt (`quire.shared.protocol.messages.SCORE`); the gateway makes the score.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from quire.gateway.api.dialect import Dialect
from quire.gateway.api.parameters import read
from quire.gateway.api.pooled_call import PooledCall, kept_tokens, usage_of
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import GenerationFailed, refused
from quire.gateway.features.rerank.pairs import PairTokenizer, TextPair
from quire.gateway.features.rerank.score_parameters import ANSWERS, BODIES, text_of
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.scoring import Scoring
from quire.gateway.model.served_model import ServedModel
from quire.gateway.serving.calls import serve_with
from quire.gateway.serving.pooled_calls import PooledLines, write_answer
from quire.gateway.serving.service import Gateway
from quire.gateway.stream import sse
from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.protocol.messages import SCORE

__all__ = ["ANSWERS", "BODIES", "rerank", "rerank_lines", "score", "score_lines"]

COHERE_V2 = "/v2/rerank"


async def rerank(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """POST /v1/rerank, /v2/rerank, /rerank: ranks documents by a query."""
    dialect = _rerank_dialect(gateway, returns_documents=request.path != COHERE_V2)
    return await serve_with(dialect, gateway, request, write_answer)


async def score(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """POST /v1/score, /score: scores pairs of texts."""
    return await serve_with(_score_dialect(gateway), gateway, request, write_answer)


def rerank_lines(gateway: Gateway, _owner: str) -> PooledLines:
    """Return the endpoint for lines of batches that are rerank calls."""
    return PooledLines(gateway, _rerank_dialect(gateway), BODIES["RerankRequest"])


def score_lines(gateway: Gateway, _owner: str) -> PooledLines:
    """Return the endpoint for lines of batches that are score calls."""
    return PooledLines(gateway, _score_dialect(gateway), BODIES["ScoreRequest"])


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """The conversion of the logits of a pair to a score, and of all scores to the body of an answer."""

    scoring: Scoring
    uses_activation: bool

    def finish(self, data: bytes) -> float:
        """Return the score from the logits that the worker sent. Raises ApiError."""
        logits = array("f")
        logits.frombytes(data)
        value = self.scoring.score(logits, self.uses_activation)
        if not math.isfinite(value):
            raise GenerationFailed("The score is not finite: the model computes infinities for this pair.")
        return value

    def answer(self, call_id: str, model: str, metadata: CallMetadata, values: Sequence[float]) -> Iterator[str]:
        head = f'{{"id":{sse.quote(ScoreDialect.prefix + call_id)},"object":"list","created":{metadata.created}'
        yield f'{head},"model":{sse.quote(model)},"data":['
        for index, value in enumerate(values):
            yield f'{"," if index else ""}{{"index":{index},"object":"score","score":{value!r}}}'
        yield f'],"usage":{sse.dumps(usage_of(metadata))}}}'


@dataclass(frozen=True, slots=True)
class RerankForm(ScoreForm):
    """The best `top_n` documents of a query. documents: None if the answer leaves them out."""

    top_n: int
    documents: Sequence[str | Mapping[str, Any]] | None

    def answer(self, call_id: str, model: str, metadata: CallMetadata, values: Sequence[float]) -> Iterator[str]:
        yield f'{{"id":{sse.quote(RerankDialect.prefix + call_id)},"model":{sse.quote(model)},"results":['
        # Equal scores keep the order of the documents.
        best = sorted(range(len(values)), key=lambda index: -values[index])[: self.top_n or None]
        for place, index in enumerate(best):
            result: dict[str, Any] = {"index": index, "relevance_score": values[index]}
            if self.documents is not None:
                document = self.documents[index]
                result["document"] = {"text": document} if isinstance(document, str) else document
            yield f"{',' if place else ''}{sse.dumps(result)}"
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        yield f'],"usage":{sse.dumps(usage_of(metadata))},"meta":{sse.dumps(meta)}}}'


class _PairDialect(Dialect):
    """Reads calls whose prompts are pairs of texts, for one model."""

    body: str  # a name of BODIES

    def __init__(self, model: ServedModel, max_pairs: int) -> None:
        """max_pairs: of one call."""
        self.model, self.max_pairs = model, max_pairs

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> PooledCall:
        """Check and tokenize a call. Raises ApiError."""
        table, unsupported, _ = BODIES[self.body]
        given = read(body, table, unsupported)
        limits.check_model(given["model"])
        scoring = self.model.scoring
        if isinstance(scoring, str):
            raise refused("model", f"{self.model.name} gives no scores: {scoring}.", code="no_scores")
        if "instruction" in given and not scoring.takes_instruction:
            raise refused(
                "instruction", f"The prompt of {self.model.name} has no place for an instruction; leave it out."
            )
        pairs = self.pairs(given)
        tokenizer = PairTokenizer(
            self.model.tokenizer,
            scoring,
            limits.max_model_len,
            given.get("instruction", ""),
            kept_tokens(given.get("truncate_prompt_tokens"), limits.max_model_len),
            given.get("max_tokens_per_query", 0),
            given.get("max_tokens_per_doc", 0),
        )
        prompts = await renderer.run(tokenizer.characters(pairs), tokenizer.prompts, pairs)
        for pair, prompt in zip(pairs, prompts, strict=True):
            limits.check_vocabulary(pair.name, prompt)
        form = self.pooled_form(given, ScoreForm(scoring, given.get("use_activation", True)))
        return PooledCall.with_inputs(given, limits, prompts, form, SCORE, scoring.token_ids)

    @abstractmethod
    def pairs(self, given: Mapping[str, Any]) -> list[TextPair]:
        """Return the pairs of a call. Raises InvalidRequest."""

    @abstractmethod
    def pooled_form(self, given: Mapping[str, Any], form: ScoreForm) -> ScoreForm:
        """Return the form of the answer. form: of the scores."""

    def check_count(self, name: str, count: int) -> None:
        """Raise InvalidRequest for more pairs than a call may have."""
        if count > self.max_pairs:
            raise refused(
                name,
                f"{name} has {count} elements; this server allows at most {self.max_pairs} in one call "
                "(--max-embedding-inputs).",
            )


class RerankDialect(_PairDialect):
    """Reads rerank calls. returns_documents: unless the call says."""

    name, prefix, body = "rerank", "rerank-", "RerankRequest"

    def __init__(self, model: ServedModel, max_pairs: int, returns_documents: bool) -> None:
        super().__init__(model, max_pairs)
        self._returns_documents = returns_documents

    def pairs(self, given: Mapping[str, Any]) -> list[TextPair]:
        query, documents = given["query"], given["documents"]
        self.check_count("documents", len(documents))
        return [
            TextPair("query", query, f"documents[{index}]", text_of(one) or "") for index, one in enumerate(documents)
        ]

    def pooled_form(self, given: Mapping[str, Any], form: ScoreForm) -> RerankForm:
        documents = given["documents"] if given.get("return_documents", self._returns_documents) else None
        return RerankForm(form.scoring, form.uses_activation, given.get("top_n", 0), documents)


class ScoreDialect(_PairDialect):
    """Reads score calls."""

    name, prefix, body = "score", "score-", "ScoreRequest"

    def pairs(self, given: Mapping[str, Any]) -> list[TextPair]:
        names = ("queries", "documents") if "queries" in given else ("text_1", "text_2")
        if names[0] not in given:
            raise refused("queries", "queries and documents are required.", code="missing_required_parameter")
        if "queries" in given and "text_1" in given:
            raise refused("text_1", "text_1 is another name of queries; give one of them.")
        queries, documents = (given[name] for name in names)
        self.check_count(names[1], len(documents))
        if len(queries) not in (1, len(documents)):
            raise refused(
                names[0],
                f"{names[0]} has {len(queries)} elements and {names[1]} {len(documents)}; give one, or one for each.",
            )
        return [
            TextPair(
                names[0] if len(queries) == 1 else f"{names[0]}[{index}]",
                text_of(queries[index % len(queries)]) or "",
                f"{names[1]}[{index}]",
                text_of(one) or "",
            )
            for index, one in enumerate(documents)
        ]

    def pooled_form(self, given: Mapping[str, Any], form: ScoreForm) -> ScoreForm:
        return form


def _rerank_dialect(gateway: Gateway, returns_documents: bool = True) -> RerankDialect:
    return RerankDialect(gateway.model, gateway.settings.max_embedding_inputs, returns_documents)


def _score_dialect(gateway: Gateway) -> ScoreDialect:
    return ScoreDialect(gateway.model, gateway.settings.max_embedding_inputs)

"""The parameters of rerank calls, as Cohere, Jina and vLLM have them, and of score calls, as vLLM has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.gateway.api.labels import LABELS
from quire.gateway.api.parameters import OF_THE_CALL, Body
from quire.shared.config.schema_parts import COUNT as NATURAL
from quire.shared.config.schema_parts import NUMBER, TEXT, any_of, array, record
from quire.shared.config.validators import Flag, Integer, Text, wrong
from quire.shared.protocol.messages import MAX_PROMPT_TOKENS
from quire.shared.protocol.sampling_params import Parameter

MAX_INSTRUCTION, MAX_QUERY = 16_384, 2**20
_DOCUMENT = any_of(TEXT, record(text=TEXT))


class Documents:
    """A text, an object with a `text`, or an array of these. max_items: checked by the call, as a setting bounds it."""

    def __init__(self, takes_one: bool) -> None:
        self._takes_one = takes_one
        self.schema = any_of(_DOCUMENT, array(_DOCUMENT, low=1)) if takes_one else array(_DOCUMENT, low=1)

    def __call__(self, name: str, value: Any) -> list[str | dict[str, Any]]:
        values = [value] if self._takes_one and type(value) in (str, dict) else value
        if type(values) is not list or not values:
            raise wrong(name, self, value)
        for index, one in enumerate(values):
            if text_of(one) is None:
                raise wrong(f"{name}[{index}]", "a string, or an object with a string `text`", one)
        return values

    def __str__(self) -> str:
        many = "an array of strings or objects with a string `text`, not empty"
        return f"a string, an object with a string `text`, or {many}" if self._takes_one else many


def text_of(document: Any) -> str | None:
    """Return the text of a document; None if it has none."""
    text = document.get("text") if type(document) is dict else document
    return text if type(text) is str else None


_COMMON: dict[str, Parameter] = {
    "instruction": Parameter(
        read=Text(1, MAX_INSTRUCTION),
        help="extension, as in vLLM: the task, for models whose prompt has a place for it, such as Qwen3-Reranker; by "
        "default that of the model",
    ),
    "max_tokens_per_doc": Parameter(
        read=Integer(0, MAX_PROMPT_TOKENS),
        help="cut longer documents to this many tokens; 0 is as without. By default none is cut: at Cohere, to 4096",
    ),
    "max_tokens_per_query": Parameter(
        read=Integer(0, MAX_PROMPT_TOKENS),
        help="extension, as in vLLM: cut a longer query to this many tokens; 0 is as without",
    ),
    "truncate_prompt_tokens": Parameter(
        read=Integer(-1, MAX_PROMPT_TOKENS),
        help="extension, as in vLLM: cut documents so that no prompt has more tokens than this; -1 is the longest "
        "context. By default a prompt that is too long is refused",
    ),
    "use_activation": Parameter(
        read=Flag(),
        default=True,
        help="extension, as in vLLM: the function of the model's files, by default the logistic one, which makes a "
        "number from 0 to 1 of a logit. Without it scores are logits",
    ),
    **{name: OF_THE_CALL[name] for name in ("cache_salt", "priority", "timeout")},
    **{name: LABELS[name] for name in ("user", "safety_identifier")},
}
_DOCUMENTS = "at most `--max-embedding-inputs` (2048)"
RERANK: dict[str, Parameter] = {
    "model": OF_THE_CALL["model"],
    "query": Parameter(read=Text(1, MAX_QUERY), required=True, help="the text with which documents are compared"),
    "documents": Parameter(
        read=Documents(takes_one=False),
        required=True,
        kind="array of strings and objects with a `text`",
        help=f"{_DOCUMENTS}. Other fields of an object have no effect, and come back with it",
    ),
    "top_n": Parameter(
        read=Integer(0, MAX_PROMPT_TOKENS), help="return only the best this many; by default, and with 0, all"
    ),
    "return_documents": Parameter(
        read=Flag(),
        help="return each document with its score: by default, as in vLLM, but not at `/v2/rerank`, as at Cohere",
    ),
    **_COMMON,
}
_TEXTS = Parameter(read=Documents(takes_one=True), help="", kind="string, object with a `text`, or array of these")
SCORE: dict[str, Parameter] = {
    "model": OF_THE_CALL["model"],
    "queries": replace(
        _TEXTS, requires="documents", help=f"one query, or one for each document; {_DOCUMENTS}. Only with `documents`"
    ),
    "documents": replace(_TEXTS, requires="queries", help="the documents. Only with `queries`"),
    "text_1": replace(_TEXTS, requires="text_2", help="another name of `queries`. Only with `text_2`"),
    "text_2": replace(_TEXTS, requires="text_1", help="another name of `documents`. Only with `text_1`"),
    **_COMMON,
}
# Parameters of other servers, with the values that ask for nothing.
UNSUPPORTED = {
    "rank_fields": (["text"],),
    "max_chunks_per_doc": (),
    "relevant_spans": (),
    "truncation": (),
    "return_embeddings": (False,),
}
# By the names of the bodies' schemas in /openapi.json.
BODIES = {"RerankRequest": Body(RERANK, UNSUPPORTED, ()), "ScoreRequest": Body(SCORE, {}, ())}
_USAGE = record(prompt_tokens=NATURAL, total_tokens=NATURAL)
ANSWERS = {
    "RerankList": record(
        id=TEXT,
        model=TEXT,
        results=array(record({"document": {"type": "object"}}, index=NATURAL, relevance_score=NUMBER)),
        usage=_USAGE,
        meta=record(api_version=record(version=TEXT), billed_units=record(search_units=NATURAL)),
    ),
    "ScoreList": record(
        id=TEXT,
        object={"const": "list"},
        created=NATURAL,
        model=TEXT,
        data=array(record(index=NATURAL, object={"const": "score"}, score=NUMBER)),
        usage=_USAGE,
    ),
}

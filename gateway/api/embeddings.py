"""POST /v1/embeddings: reads the inputs of a call, and renders their embeddings."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.gateway.api.dialect import Dialect
from quire.gateway.api.labels import LABELS
from quire.gateway.api.parameters import OF_THE_CALL, Body, anything, read
from quire.gateway.api.pooled_call import PooledCall, kept_tokens, usage_of
from quire.gateway.api.prompts import PROMPTS_SCHEMA, read_prompts
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import GenerationFailed, refused, too_long
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream import sse
from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.config.validators import Flag, Integer, OneOf
from quire.shared.protocol.messages import MAX_PROMPT_TOKENS, POOLINGS
from quire.shared.protocol.sampling_params import Parameter

NAME = "embeddings"
PREFIX = "embd-"
MAX_DIMENSIONS = 65_536
FLOAT, BASE64 = "float", "base64"

EMBEDDINGS: dict[str, Parameter] = {
    "input": Parameter(
        read=anything,
        required=True,
        kind="string, array of token ids, or array of strings and arrays of token ids",
        schema=PROMPTS_SCHEMA,
        help="at most `--max-embedding-inputs` (2048) of them, each of 1 token up to the longest context. Extension: "
        "strings and arrays of token ids may be mixed",
    ),
    "model": OF_THE_CALL["model"],
    "encoding_format": Parameter(
        read=OneOf((FLOAT, BASE64)),
        default=FLOAT,
        help="`base64` is that of the numbers as little-endian float32, with the same values",
    ),
    "dimensions": Parameter(
        read=Integer(1, MAX_DIMENSIONS),
        help="length of each embedding: its first numbers, at most as many as the model gives; by default all. With "
        "`normalize` the shorter vector has the Euclidean length 1 again",
    ),
    "pooling": Parameter(
        read=OneOf(POOLINGS),
        help="extension: the hidden state of the last token, or the mean of all tokens. By default that of the model's "
        "sentence-transformers files, and `last` without such files",
    ),
    "normalize": Parameter(
        read=Flag(), default=True, help="extension, as in vLLM: divide each embedding by its Euclidean length"
    ),
    "add_special_tokens": Parameter(
        read=Flag(),
        default=True,
        help="extension, as in vLLM: the special tokens that the tokenizer puts around a text",
    ),
    "truncate_prompt_tokens": Parameter(
        read=Integer(-1, MAX_PROMPT_TOKENS),
        help="extension, as in vLLM: keep at most this many tokens of each input, the last ones; -1 is the longest "
        "context. By default an input that is too long is refused",
    ),
    **{name: OF_THE_CALL[name] for name in ("cache_salt", "priority", "timeout")},
    **{name: LABELS[name] for name in ("user", "safety_identifier")},
}
# By the name of the body's schema in /openapi.json.
BODIES = {"EmbeddingRequest": Body(EMBEDDINGS, {})}


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """The form in which embeddings are written. dimensions: None for all that the model gives."""

    encoding: str
    dimensions: int | None
    normalize: bool

    def finish(self, data: bytes) -> array[float]:
        """Return the numbers of an embedding from those that the worker sent. Raises ApiError."""
        values = array("f")
        values.frombytes(data)
        if self.dimensions is not None:
            _check_dimensions(self.dimensions, len(values))
            del values[self.dimensions :]
        length = math.hypot(*values)
        if not math.isfinite(length):
            raise GenerationFailed("The embedding is not finite: the model computes infinities for this input.")
        return array("f", [value / length for value in values]) if self.normalize and length else values

    def render(self, values: array[float]) -> str:
        """Return the JSON value of an embedding."""
        if self.encoding == BASE64:
            return f'"{base64.b64encode(values.tobytes()).decode("ascii")}"'
        return f"[{','.join(map(repr, values))}]"

    def answer(self, call_id: str, model: str, metadata: CallMetadata, values: Sequence[array[float]]) -> Iterator[str]:
        head = f'{{"id":{sse.quote(PREFIX + call_id)},"object":"list","created":{metadata.created}'
        yield f'{head},"model":{sse.quote(model)},"data":['
        for index, one in enumerate(values):
            yield f'{"," if index else ""}{{"object":"embedding","index":{index},"embedding":{self.render(one)}}}'
        yield f'],"usage":{sse.dumps(usage_of(metadata))}}}'


class EmbeddingDialect(Dialect):
    """Reads embedding calls of one model."""

    name = NAME
    prefix = PREFIX

    def __init__(self, model: ServedModel, max_inputs: int) -> None:
        """max_inputs: of one call."""
        self.model = model
        self.max_inputs = max_inputs

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> PooledCall:
        """Check and tokenize a call. Raises ApiError."""
        return await _read_call(body, limits, renderer, self.model, self.max_inputs)


async def _read_call(
    body: Mapping[str, Any], limits: RequestLimits, renderer: Renderer, model: ServedModel, max_inputs: int
) -> PooledCall:
    given = read(body, EMBEDDINGS, unsupported={})
    limits.check_model(given["model"])
    form = EmbeddingFormat(given.get("encoding_format", FLOAT), given.get("dimensions"), given.get("normalize", True))
    if form.dimensions is not None and model.hidden_size is not None:
        _check_dimensions(form.dimensions, model.hidden_size)
    pooling = given.get("pooling") or model.pooling
    if not pooling:
        raise refused(
            "pooling",
            f"The sentence-transformers files of {model.name} name a pooling that this server does not have; give "
            f"pooling: {' or '.join(POOLINGS)}.",
        )
    kept = kept_tokens(given.get("truncate_prompt_tokens"), limits.max_model_len)
    named = read_prompts(body["input"], max_inputs, limits.vocab_size, "input")
    texts = [(name, text) for name, text in named if isinstance(text, str)]
    adds_special_tokens = given.get("add_special_tokens", True)
    tokenized = iter(await renderer.texts(texts, None if kept else limits.max_model_len, adds_special_tokens))
    inputs = []
    for name, prompt in named:
        token_ids = next(tokenized) if isinstance(prompt, str) else prompt
        inputs.append(_checked(name, token_ids[-kept:] if kept else token_ids, limits))
    return PooledCall.with_inputs(given, limits, inputs, form, pooling)


def _check_dimensions(dimensions: int, available: int) -> None:
    if dimensions > available:
        raise refused(
            "dimensions", f"dimensions is {dimensions}, and the embeddings of this model have {available} numbers."
        )


def _checked(name: str, token_ids: Sequence[int], limits: RequestLimits) -> tuple[int, ...]:
    """Return the tokens of an input. Raises InvalidRequest."""
    if not token_ids:
        raise refused(name, f"{name} is empty: it has no tokens.", code="empty_prompt")
    if max(token_ids) >= limits.vocab_size:
        raise refused(
            name,
            f"{name} has a token that the model lacks (id {max(token_ids)}, vocabulary {limits.vocab_size}): the "
            "tokenizer knows more tokens than the model. Leave special tokens out of the text.",
        )
    if len(token_ids) > limits.max_model_len:
        length = len(token_ids)
        remedy = "Shorten it, or give truncate_prompt_tokens."
        raise too_long(name, limits.max_model_len, length, f"{name} has {length} tokens", remedy)
    return tuple(token_ids)

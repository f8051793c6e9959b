"""POST /v1/embeddings: reads the inputs of a call, and renders their embeddings."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.gateway.api.call import Call
from quire.gateway.api.dialect import Dialect
from quire.gateway.api.labels import LABELS
from quire.gateway.api.parameters import OF_THE_CALL, Body, anything, read
from quire.gateway.api.prompts import PROMPTS_SCHEMA, read_prompts
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import GenerationFailed, refused, too_long
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream import sse
from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.config.validators import Flag, Integer, OneOf
from quire.shared.protocol.keys import DEFAULT_CLASS
from quire.shared.protocol.messages import MAX_PROMPT_TOKENS, POOLINGS, GenerationRequest, SamplingParams
from quire.shared.protocol.sampling_params import Parameter

NAME = "embeddings"
PREFIX = "embd-"
MAX_DIMENSIONS = 65_536
FLOAT, BASE64 = "float", "base64"
# A request must have sampling parameters; one with a pooling does not use them.
NO_SAMPLING = SamplingParams(max_tokens=1)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall(Call):
    """A call whose prompts are the inputs.

    form: of the answer. It is not part of the metadata, since each caller with the same idempotency key sends the same
    body.
    """

    pooling: str
    form: EmbeddingFormat

    def requests(self, call_id: str) -> list[GenerationRequest]:
        """Return a request per input; the first has the id of the call."""
        return [replace(request, pooling=self.pooling) for request in Call.requests(self, call_id)]


class EmbeddingDialect(Dialect):
    """Reads embedding calls of one model."""

    name = NAME
    prefix = PREFIX

    def __init__(self, model: ServedModel, max_inputs: int) -> None:
        """max_inputs: of one call."""
        self.model = model
        self.max_inputs = max_inputs

    async def read(self, body: dict[str, Any], limits: RequestLimits, renderer: Renderer) -> EmbeddingCall:
        """Check and tokenize a call. Raises ApiError."""
        return await _read_call(body, limits, renderer, self.model, self.max_inputs)


async def _read_call(
    body: Mapping[str, Any], limits: RequestLimits, renderer: Renderer, model: ServedModel, max_inputs: int
) -> EmbeddingCall:
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
    kept = _kept_tokens(given.get("truncate_prompt_tokens"), limits.max_model_len)
    named = read_prompts(body["input"], max_inputs, limits.vocab_size, "input")
    texts = [(name, text) for name, text in named if isinstance(text, str)]
    adds_special_tokens = given.get("add_special_tokens", True)
    tokenized = iter(await renderer.texts(texts, None if kept else limits.max_model_len, adds_special_tokens))
    inputs = []
    for name, prompt in named:
        token_ids = next(tokenized) if isinstance(prompt, str) else prompt
        inputs.append(_checked(name, token_ids[-kept:] if kept else token_ids, limits))
    digest = limits.adapters.get(given["model"], "")
    return EmbeddingCall(
        model=given["model"],
        common=NO_SAMPLING,
        about=CallMetadata(
            dialect="",
            created=0,
            n=1,
            include_usage=False,
            stop=(),
            prompt_tokens=sum(map(len, inputs)),
            requests=len(inputs),
            is_background=False,
            adapter=given["model"] if digest else "",
        ),
        priority=given.get("priority", DEFAULT_CLASS),
        timeout_s=given.get("timeout"),
        user=given.get("safety_identifier") or given.get("user", ""),
        cache_salt=given.get("cache_salt", ""),
        prompts=tuple(inputs),
        sampling=(NO_SAMPLING,) * len(inputs),
        adapter_digest=digest,
        pooling=pooling,
        form=form,
    )


def _check_dimensions(dimensions: int, available: int) -> None:
    if dimensions > available:
        raise refused(
            "dimensions", f"dimensions is {dimensions}, and the embeddings of this model have {available} numbers."
        )


def _kept_tokens(truncate_prompt_tokens: int | None, max_model_len: int) -> int:
    """Return the number of tokens of an input that are kept; 0 for all. Raises InvalidRequest."""
    if truncate_prompt_tokens == 0:
        raise refused("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, not 0.")
    if truncate_prompt_tokens is None:
        return 0
    if truncate_prompt_tokens > max_model_len:
        raise refused(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens is {truncate_prompt_tokens}, which is more than the maximum context length of "
            f"{max_model_len} tokens; -1 stands for it.",
        )
    return max_model_len if truncate_prompt_tokens < 0 else truncate_prompt_tokens


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


def render_answer(
    call_id: str, model: str, metadata: CallMetadata, form: EmbeddingFormat, embeddings: Iterable[array[float]]
) -> Iterator[str]:
    """Yield the answer to a call: pieces of one JSON object. embeddings: in the order of the inputs."""
    head = f'{{"id":{sse.quote(PREFIX + call_id)},"object":"list","created":{metadata.created}'
    yield f'{head},"model":{sse.quote(model)},"data":['
    for index, values in enumerate(embeddings):
        yield f'{"," if index else ""}{{"object":"embedding","index":{index},"embedding":{form.render(values)}}}'
    usage = {"prompt_tokens": metadata.prompt_tokens, "total_tokens": metadata.prompt_tokens}
    yield f'],"usage":{sse.dumps(usage)}}}'

"""A call after it was read: what it asks for, per prompt, within the limits of model and server."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.gateway.api.call_metadata import CallMetadata
from quire.gateway.api.errors import InvalidRequest, ModelNotFound
from quire.gateway.api.options import Options
from quire.gateway.api.parameters import shown
from quire.gateway.model.sampling_defaults import SamplingDefaults
from quire.shared.logprobs import record_bytes
from quire.shared.messages import MAX_FRAME_BYTES, GenerationRequest, SamplingParams

# What a token takes in a message at most, and what the message takes beside its tokens and its records.
TOKEN_BYTES = 5
MESSAGE_BYTES = 64 * 1024


def request_id(call_id: str, index: int) -> str:
    """The id of a call's request for the prompt `index`; the first has the id of the call."""
    return f"{call_id}-{index}" if index else call_id


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call: a request to the queue for each prompt."""

    options: Options
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def about(self, dialect: str, created: int) -> CallMetadata:
        """What another gateway must know to answer the call."""
        options = self.options
        return CallMetadata(
            dialect=dialect,
            created=created,
            n=options.n,
            include_usage=options.include_usage,
            stop=self.sampling[0].stop,
            prompt_tokens=self.prompt_tokens,
            requests=len(self.prompts),
            is_background=options.background,
        )

    def requests(self, call_id: str) -> list[GenerationRequest]:
        """The requests; the id of the call, which is that of the first, is in the headers and in the log."""
        return [
            GenerationRequest(
                id=request_id(call_id, index),
                model=self.options.model,
                prompt=prompt,
                sampling=sampling,
                cache_salt=self.options.cache_salt,
            )
            for index, (prompt, sampling) in enumerate(zip(self.prompts, self.sampling, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What this server allows now."""

    model: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    max_n: int
    max_prompts: int
    max_choices: int
    special_tokens: Mapping[str, int]  # of the tokenizer, by their texts
    sampling_defaults: SamplingDefaults

    def check_model(self, name: str) -> None:
        if name != self.model:
            raise ModelNotFound(f"There is no model {shown(name)} here; this server has {self.model!r}.", param="model")

    def check_choices(self, prompts: int, options: Options) -> None:
        """Whether so many prompts may have what `n`, `best_of` and `beam_width` ask for each. Raises InvalidRequest."""
        for name, count in options.counts.items():
            if count > self.max_n:
                raise InvalidRequest(
                    f"{name} is {count}; this server allows at most {self.max_n} (its setting --max-n).",
                    param=name,
                    code="invalid_value",
                )
            if count > self.max_num_seqs:
                raise InvalidRequest(
                    f"{name} is {count}; a worker of this server runs at most {self.max_num_seqs} sequences at once "
                    "(its setting --max-num-seqs).",
                    param=name,
                    code="invalid_value",
                )
            if prompts * count > self.max_choices:
                raise InvalidRequest(
                    f"{prompts} prompts times {name} = {count} are {prompts * count}; this server allows at most "
                    f"{self.max_choices} in one call (its setting --max-choices).",
                    param=name,
                    code="invalid_value",
                )

    def call(self, options: Options, prompts: Sequence[tuple[str, list[int]]], default_max_tokens: int | None) -> Call:
        """The call for these prompts, each with the name that errors call it by. Raises InvalidRequest.

        `default_max_tokens` is for calls that do not say; None: the rest of the context.
        """
        sampling = []
        self._check_token_ids("logit_bias", [token_id for token_id, _ in options.values["logit_bias"]])
        self._check_token_ids("stop_token_ids", options.values["stop_token_ids"])
        for name, token_ids in prompts:
            if token_ids and max(token_ids) >= self.vocab_size:
                raise InvalidRequest(
                    f"{name} has a token that the model lacks (id {max(token_ids)}, vocabulary {self.vocab_size}): the "
                    "tokenizer knows more tokens than the model. Leave special tokens out of the text.",
                    param=name,
                    code="invalid_value",
                )
            max_tokens = self._max_tokens(name, len(token_ids), options.max_tokens, default_max_tokens)
            seed = options.seed if options.seed is not None else secrets.randbits(64)
            sampling.append(params := options.sampling(max_tokens, seed, self.special_tokens, self.sampling_defaults))
            _check_size(params)
        return Call(options, tuple(tuple(token_ids) for _, token_ids in prompts), tuple(sampling))

    def _check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        if (largest := max(token_ids, default=0)) >= self.vocab_size:
            raise InvalidRequest(
                f"{name} has the token id {largest}, and the last one of the model is {self.vocab_size - 1}.",
                param=name,
                code="invalid_value",
            )

    def _max_tokens(self, name: str, length: int, asked: int | None, default: int | None) -> int:
        if length == 0:
            raise InvalidRequest(f"{name} is empty: it has no tokens.", param=name, code="empty_prompt")
        rest = self.max_model_len - length
        if rest < 1:
            raise self._too_long(
                name, f"However, {name} has {length} tokens, and at least one must be left for the answer."
            )
        if asked is None:
            return rest if default is None else min(default, rest)
        if asked > rest:
            raise self._too_long(
                name, f"However, you requested {length + asked} tokens ({length} in {name}, {asked} in the completion)."
            )
        return asked

    def _too_long(self, name: str, however: str) -> InvalidRequest:
        return InvalidRequest(
            f"This model's maximum context length is {self.max_model_len} tokens. {however} Please reduce the length "
            f"of {name} or of the completion.",
            param=name,
            code="context_length_exceeded",
        )


def _check_size(params: SamplingParams) -> None:
    """Whether log-probabilities that leave all at once, because the choices are ranked, fit into one message."""
    if not params.logprobs or params.is_streamed:
        return
    size = MESSAGE_BYTES + params.n * params.max_tokens * (TOKEN_BYTES + record_bytes(params.top_logprobs))
    if size > MAX_FRAME_BYTES:
        raise InvalidRequest(
            f"logprobs of {params.n} ranked choices of {params.max_tokens} tokens take up to {size} bytes; they leave "
            f"together, in at most {MAX_FRAME_BYTES}. Please lower max_tokens, n or the number of alternatives.",
            param="logprobs",
            code="invalid_value",
        )

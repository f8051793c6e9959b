"""Limits of model and server, and the calls that keep to them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.gateway.api.tools import schema_size
from quire.gateway.errors.api_errors import ContextExceeded, ModelNotFound, refused, too_long
from quire.gateway.output.tools import Tool
from quire.shared.config.validators import shown
from quire.shared.protocol.logprobs import record_bytes
from quire.shared.protocol.messages import MAX_FRAME_BYTES, SamplingParams
from quire.shared.protocol.sampling_params import REPETITION_OFF

# The largest size of a token in a message, and of the rest of the message without tokens and log-probabilities.
TOKEN_BYTES = 5
MESSAGE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of this server now; those of its workers may change."""

    model: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    max_n: int
    max_prompts: int
    max_choices: int
    max_tools: int
    max_schema_bytes: int
    max_schema_depth: int
    special_tokens: Mapping[str, int]  # token ids of the tokenizer's special tokens, by text
    sampling_defaults: Mapping[str, float]
    system_fingerprint: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)  # digests of the LoRA adapters that calls may name
    aliases: Sequence[str] = ()  # other names of the model
    enforces_tools: bool = True  # tool calls follow a grammar
    thinking_token_budget: int = -1  # most tokens of reasoning; -1: any number
    repetition_detection: tuple[int, ...] = ()  # of calls without the parameter of this name
    is_classifier: bool = False  # the model scores texts, and generates none

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless the name is that of the model, an alias, or that of one of its adapters."""
        if name != self.model and name not in self.adapters and name not in self.aliases:
            raise ModelNotFound(f"There is no model {shown(name)} here; this server has {self.model!r}.", param="model")

    def check_generates(self) -> None:
        """Raise InvalidRequest unless the model generates text."""
        if self.is_classifier:
            raise refused(
                "model",
                f"{self.model} has a head for scores in place of one for tokens; use /v1/rerank or /v1/score.",
                code="no_generation",
            )

    def check_choices(self, prompts: int, counts: Mapping[str, int]) -> None:
        """Check the sequences per prompt of a call with this many prompts, by parameter. Raises InvalidRequest."""
        for name, count in counts.items():
            if count > self.max_n:
                raise refused(
                    name, f"{name} is {count}; this server allows at most {self.max_n} (its setting --max-n)."
                )
            if count > self.max_num_seqs:
                raise refused(
                    name,
                    f"{name} is {count}; a worker of this server runs at most {self.max_num_seqs} sequences at once "
                    "(its setting --max-num-seqs).",
                )
            if prompts * count > self.max_choices:
                raise refused(
                    name,
                    f"{prompts} prompts times {name} = {count} are {prompts * count}; this server allows at most "
                    f"{self.max_choices} in one call (its setting --max-choices).",
                )

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Check number and schemas of the tools of a call. Raises InvalidRequest that names the tool."""
        if len(tools) > self.max_tools:
            raise refused(
                "tools", f"tools has {len(tools)} tools; this server allows at most {self.max_tools} (--max-tools)."
            )
        # Nearly always all schemas together are within the limits of one.
        size, depth = schema_size([tool.parameters for tool in tools])
        if size <= self.max_schema_bytes and depth <= self.max_schema_depth:
            return
        for index, tool in enumerate(tools):
            name = f"tools[{index}].function.parameters"
            self._check_schema(name, f"{name}, of the tool {tool.name},", tool.parameters)

    def check_answer(self, grammar: str, name: str) -> None:
        """Check the size of the JSON schema that an answer follows, if it follows one. Raises InvalidRequest.

        grammar: the text of a grammar; empty without one. name: of the parameter that it comes from.
        """
        schema = json.loads(grammar).get("json_schema") if grammar else None
        if schema is not None:
            self._check_schema(name, name, schema)

    def _check_schema(self, name: str, shown_name: str, schema: Mapping[str, Any]) -> None:
        size, depth = schema_size(schema)
        if size > self.max_schema_bytes:
            raise refused(
                name,
                f"{shown_name} has {size} characters; this server allows at most {self.max_schema_bytes} "
                "(--max-schema-bytes).",
            )
        if depth > self.max_schema_depth:
            raise refused(
                name, f"{shown_name} is nested more than {self.max_schema_depth} levels deep (--max-schema-depth)."
            )

    def sampling(
        self,
        common: SamplingParams,
        prompts: Sequence[tuple[str, Sequence[int]]],
        *,
        max_tokens: int | None,
        default_max_tokens: int | None,
        seed: int | None,
    ) -> tuple[SamplingParams, ...]:
        """Return the final sampling parameters for each of these prompts, which have names for errors.

        Raises InvalidRequest. common: those that all prompts share. max_tokens: None if the call does not say; then
        default_max_tokens holds, or, if that is None, the rest of the context. seed: None for a random one.
        """
        self._check_token_ids("logit_bias", [token_id for token_id, _ in common.logit_bias])
        self._check_token_ids("stop_token_ids", common.stop_token_ids)
        self._check_token_ids("allowed_token_ids", common.allowed_token_ids)
        common = replace(common, stop_token_ids=self._stop_token_ids(common))
        if not common.beam_width:
            rule = common.repetition_detection or self.repetition_detection
            common = replace(common, repetition_detection=() if rule == REPETITION_OFF else rule)
        sampling = []
        for name, token_ids in prompts:
            self.check_vocabulary(name, token_ids)
            params = replace(
                common,
                max_tokens=self._max_tokens(name, len(token_ids), max_tokens, default_max_tokens),
                seed=seed if seed is not None else secrets.randbits(64),
            )
            _check_min_tokens(params)
            _check_size(params)
            sampling.append(params)
        return tuple(sampling)

    def check_vocabulary(self, name: str, token_ids: Sequence[int]) -> None:
        """Check the token ids of a text. Raises InvalidRequest."""
        if (largest := max(token_ids, default=0)) >= self.vocab_size:
            raise refused(
                name,
                f"{name} has a token that the model lacks (id {largest}, vocabulary {self.vocab_size}): the tokenizer "
                "knows more tokens than the model. Leave special tokens out of the text.",
            )

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the stop tokens with those of stop strings that are special tokens, which have no text in answers."""
        by_text = [self.special_tokens[text] for text in params.stop if text in self.special_tokens]
        return tuple(dict.fromkeys([*params.stop_token_ids, *by_text]))

    def _check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        if (largest := max(token_ids, default=0)) >= self.vocab_size:
            raise refused(
                name, f"{name} has the token id {largest}, and the last one of the model is {self.vocab_size - 1}."
            )

    def _max_tokens(self, name: str, length: int, asked: int | None, default: int | None) -> int:
        if length == 0:
            raise refused(name, f"{name} is empty: it has no tokens.", code="empty_prompt")
        rest = self.max_model_len - length
        if rest < min(1, 1 if asked is None else asked):
            raise self._too_long(
                name, length, f"{name} has {length} tokens, and at least one must be left for the answer"
            )
        if asked is None:
            return rest if default is None else min(default, rest)
        if asked > rest:
            however = f"you requested {length + asked} tokens ({length} in {name}, {asked} in the completion)"
            raise self._too_long(name, length, however)
        return asked

    def _too_long(self, name: str, length: int, however: str) -> ContextExceeded:
        remedy = f"Please reduce the length of {name} or of the completion."
        return too_long(name, self.max_model_len, length, however, remedy)


def _check_min_tokens(params: SamplingParams) -> None:
    if params.min_tokens > params.max_tokens:
        raise refused(
            "min_tokens",
            f"min_tokens is {params.min_tokens}, which is more than the {params.max_tokens} tokens that may be "
            "generated.",
        )


def _check_size(params: SamplingParams) -> None:
    """Check that the log-probabilities of ranked choices, which leave all at once, fit into one message."""
    if not params.logprobs or params.is_streamed:
        return
    size = MESSAGE_BYTES + params.n * params.max_tokens * (TOKEN_BYTES + record_bytes(params.top_logprobs))
    if size > MAX_FRAME_BYTES:
        raise refused(
            "logprobs",
            f"logprobs of {params.n} ranked choices of {params.max_tokens} tokens take up to {size} bytes; they leave "
            f"together, in at most {MAX_FRAME_BYTES}. Please lower max_tokens, n or the number of alternatives.",
        )

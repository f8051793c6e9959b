"""The bodies with which an upstream is asked for one choice of a request, and the parameters that it cannot honour."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.upstream.capabilities import Capabilities, ServerFamily

# Parameters that decide what an answer is, with the families that know them. What only shapes the choice of tokens
# (top_k, penalties ...) goes to every upstream under vLLM's names.
_KNOWN = {
    "ignore_eos": (ServerFamily.VLLM, ServerFamily.SGLANG, ServerFamily.LLAMA_CPP),
    "min_tokens": (ServerFamily.VLLM, ServerFamily.SGLANG),
    "bad_words": (ServerFamily.VLLM,),
    "allowed_token_ids": (ServerFamily.VLLM,),
    # A streaming llama.cpp server leaves out tokens of characters that have several.
    "logprobs": (ServerFamily.VLLM,),
}
# The grammars that a server takes, by kind (`shared/text/grammar.py`): its field in `structured_outputs` or the body.
_GRAMMARS = {
    ServerFamily.VLLM: {"json_schema": "json", "regex": "regex", "choice": "choice", "ebnf": "grammar"},
    ServerFamily.LLAMA_CPP: {"json_schema": "json_schema"},
}
# Defaults that are not sent to a server that may not know the parameter.
_QUIET = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# Seeds of other servers have a sign, and llama.cpp's have 32 bits, of which the last value stands for a random one.
_SIGN, _LLAMA_SEEDS = 2**63, 2**32 - 1
# Distance between the seeds of a choice and of its continuations: the same numbers must not be drawn twice.
_CONTINUED = 1 << 20


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """A choice of a request after the tokens that it has already."""

    request: GenerationRequest
    choice: int
    output: Sequence[int]

    @property
    def seed(self) -> int:
        """A seed of its own for each choice and each continuation; that of the call for the first choice."""
        return (self.request.sampling.seed + self.choice + _CONTINUED * len(self.output)) % 2**64


def static_refusal(request: GenerationRequest) -> str:
    """Return why no upstream can answer a request; empty if one may."""
    sampling = request.sampling
    asked = {
        "embeddings": bool(request.pooling),
        "LoRA adapters": bool(request.adapter),
        "use_beam_search": bool(sampling.beam_width),
        "best_of": not sampling.is_streamed and not sampling.beam_width,
        "prompt_logprobs": sampling.prompt_logprobs >= 0,
        # The grammar would begin anew after the tokens that the fork keeps.
        "images": bool(request.images),
        "thinking_token_budget": bool(sampling.thinking_end),
        "repetition_detection": bool(sampling.repetition_detection),
        "forks of structured outputs and tools": bool(request.num_kept and sampling.grammar),
    }
    return ", ".join(name for name, is_asked in asked.items() if is_asked)


def unknown_parameters(sampling: SamplingParams, upstream: Capabilities) -> str:
    """Return the parameters that this upstream cannot honour; empty if there are none."""
    asked = {name: bool(getattr(sampling, name)) for name in _KNOWN}
    names = [name for name, is_asked in asked.items() if is_asked and upstream.family not in _KNOWN[name]]
    if sampling.stop_token_ids and not upstream.returns_ids:
        names.append("stop_token_ids")
    if sampling.grammar and not _grammar_fields(sampling, upstream):
        kind, _ = _kind_of(sampling.grammar)
        names.append(f"tools with enforced calls (see --no-enforce-tools), or structured outputs of the kind {kind}")
    return ", ".join(names)


def path_and_body(asked: ChoiceRequest, upstream: Capabilities, tokenizer: Tokenizer) -> tuple[str, dict[str, Any]]:
    """Return where to send a choice, and the body."""
    if upstream.is_native:
        return "/completion", _native_body(asked) | _grammar_fields(asked.request.sampling, upstream)
    return "/v1/completions", _completion_body(asked, upstream, tokenizer)


def _completion_body(asked: ChoiceRequest, upstream: Capabilities, tokenizer: Tokenizer) -> dict[str, Any]:
    sampling, done = asked.request.sampling, len(asked.output)
    ids = [*asked.request.prompt, *asked.output]
    prompt: list[int] | str = ids
    if not upstream.takes_ids:
        has_bos = upstream.adds_bos and _is_special(tokenizer, ids[0])
        prompt = tokenizer.decode(ids[has_bos:], skip_special_tokens=False)
    knows_all = upstream.family in (ServerFamily.VLLM, ServerFamily.SGLANG)
    body: dict[str, Any] = {
        "model": upstream.model,
        "prompt": prompt,
        "stream": True,
        "max_tokens": sampling.max_tokens - done,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # Quire takes a negative seed for the same as the one that is 2**64 larger.
        "seed": (asked.seed + _SIGN) % (2 * _SIGN) - _SIGN if knows_all else asked.seed % _SIGN,
    }
    body |= {name: value for name in _QUIET if (value := getattr(sampling, name)) != _QUIET[name] or knows_all}
    if knows_all and not sampling.top_k:
        body["top_k"] = -1
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.min_tokens > done:
        body["min_tokens"] = sampling.min_tokens - done
    if not upstream.returns_ids:
        return body
    body |= {"return_token_ids": True, "skip_special_tokens": sampling.skip_special_tokens}
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if value := getattr(sampling, name):
            body[name] = list(value)
    if fields := _grammar_fields(sampling, upstream):
        body["structured_outputs"] = fields
    if sampling.logprobs:
        body |= {"logprobs": sampling.top_logprobs, "return_tokens_as_token_ids": True}
    return body


def _native_body(asked: ChoiceRequest) -> dict[str, Any]:
    """Return a body for llama.cpp's own endpoint. Its defaults are not those of other servers, so all are sent."""
    sampling = asked.request.sampling
    return {
        "prompt": [*asked.request.prompt, *asked.output],
        "stream": True,
        "return_tokens": True,
        "cache_prompt": True,
        "n_predict": sampling.max_tokens - len(asked.output),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": len(asked.request.prompt) + sampling.max_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": asked.seed % _LLAMA_SEEDS,
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": [[token, bias] for token, bias in sampling.logit_bias],
    }


def _grammar_fields(sampling: SamplingParams, upstream: Capabilities) -> dict[str, Any]:
    """Return the field with the grammar; nothing without a grammar, or if the upstream does not take its kind."""
    if not sampling.grammar or not upstream.returns_ids:
        return {}
    kind, value = _kind_of(sampling.grammar)
    field = _GRAMMARS.get(upstream.family, {}).get(kind)
    return {field: value} if field else {}


def _kind_of(grammar: str) -> tuple[str, Any]:
    (pair,) = json.loads(grammar).items()
    kind: str = pair[0]
    return kind, pair[1]


def _is_special(tokenizer: Tokenizer, token: int) -> bool:
    added = tokenizer.get_added_tokens_decoder().get(token)
    return added is not None and bool(added.special)

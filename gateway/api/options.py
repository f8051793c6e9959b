"""The options of a call: its parameters in their final form, apart from its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.gateway.api.call import Options
from quire.gateway.api.labels import read_labels
from quire.gateway.api.parameters import OF_THE_CALL, StreamOptions, read
from quire.gateway.api.prompt_parameters import check_no_tokens, of_the_prompt, read_answer, read_prompt_form
from quire.gateway.errors.api_errors import refused
from quire.gateway.output.given_grammar import GivenGrammar
from quire.shared.protocol.sampling_params import (
    GRAMMAR_PARAMETERS,
    MAX_OUTPUT_TOKENS,
    PARAMETERS,
    Parameter,
    SamplingParams,
)

# The default of `beam_width`, unless `n` is more.
DEFAULT_BEAM_WIDTH = 4


def read_options(body: Mapping[str, Any], table: Mapping[str, Parameter], defaults: Mapping[str, float]) -> Options:
    """The options in the body of a call; `defaults` are the model's, for sampling parameters that it leaves out.

    Raises InvalidRequest.
    """
    return make_options(read(body, table), defaults)


def make_options(given: Mapping[str, Any], defaults: Mapping[str, float]) -> Options:
    """The options from parameters that were read. Raises InvalidRequest."""
    call = {name: given.get(name, parameter.default) for name, parameter in OF_THE_CALL.items()}
    labels = read_labels(given)
    max_tokens = _max_tokens(given)
    stream = call["stream_options"] or StreamOptions()
    answer = read_answer(given, stream.continuous_usage_stats)
    longest = MAX_OUTPUT_TOKENS if max_tokens is None else max_tokens
    sampling = SamplingParams(**{**defaults, **_sampling(given), **of_the_prompt(answer), "max_tokens": longest})
    old_name = given.get("max_completion_tokens") is None
    check_no_tokens("max_tokens" if old_name else "max_completion_tokens", sampling, answer)
    _check_counts(sampling, call["stream"])
    return Options(
        model=call["model"],
        stream=call["stream"],
        include_usage=stream.include_usage,
        cache_salt=call["cache_salt"],
        background=call["background"],
        priority=labels.priority_class,
        timeout_s=call["timeout"],
        max_tokens=max_tokens,
        seed=given.get("seed"),
        sampling=sampling,
        grammar_parameter=grammar.name if (grammar := _grammar(given)) else "",
        answer=answer,
        form=read_prompt_form(given),
        labels=labels,
    )


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that follow from those that are given."""
    sampling = {name: value for name, value in given.items() if name in PARAMETERS}
    if type(top_logprobs := given.get("logprobs")) is int:  # a completion
        sampling |= {"logprobs": True, "top_logprobs": top_logprobs}
    if grammar := _grammar(given):
        sampling["grammar"] = grammar.text
    if given.get("use_beam_search"):
        # A beam search draws no tokens: the model's temperature and truncation do not apply to it.
        sampling |= {name: one.beam_value for name, one in PARAMETERS.items() if one.beam_value is not None}
        sampling.setdefault("beam_width", max(given.get("n", 1), DEFAULT_BEAM_WIDTH))
    return sampling


def _grammar(given: Mapping[str, Any]) -> GivenGrammar | None:
    """The grammar of the call; None if any text will do."""
    return next((given[name] for name in GRAMMAR_PARAMETERS if given.get(name)), None)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    old: int | None = given.get("max_tokens")
    new: int | None = given.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise refused(
            "max_completion_tokens", f"max_tokens is {old} and max_completion_tokens is {new}; give one of them."
        )
    return old if new is None else new


def _check_counts(sampling: SamplingParams, stream: bool) -> None:
    """Check how many sequences run for how many choices. Raises InvalidRequest."""
    n = sampling.n
    for name, count in (("best_of", sampling.best_of), ("beam_width", sampling.beam_width)):
        if 0 < count < n:
            raise refused(name, f"{name} is {count}, which is less than n = {n}; give at least n.")
    if stream and not sampling.is_streamed:
        raise refused(
            "best_of",
            f"best_of {sampling.best_of} with n {n} cannot be streamed: which choices are the best is known at the end "
            "only. Leave out stream, or let best_of be n.",
        )

"""What a call asks for beside its prompt: its parameters in their final form, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.gateway.api.errors import InvalidRequest
from quire.gateway.api.parameters import shown
from quire.gateway.model.sampling_defaults import SAMPLING_DEFAULTS, SamplingDefaults
from quire.shared.messages import SamplingParams

# Beams where the call does not say, unless it wants more choices than that.
DEFAULT_BEAM_WIDTH = 4

# Parameters that go to the sampler as they are.
_SAMPLING = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
)
# Parameters that say how a beam search goes, and mean nothing without one.
_OF_BEAMS = ("beam_width", "length_penalty", "early_stopping")
# Parameters that say how tokens are drawn, each with the value that goes with a beam search.
_OF_DRAWING = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one call.

    `max_tokens` None: as much as the call's default allows. `best_of` and `beam_width` are as in `SamplingParams`,
    where 0 is for absent. `top_logprobs` None: no log-probabilities are asked for. `json_schema` empty: any text.
    """

    model: str
    stream: bool
    include_usage: bool
    n: int
    best_of: int
    beam_width: int
    max_tokens: int | None
    seed: int | None
    cache_salt: str
    background: bool
    priority: str
    timeout_s: float | None
    top_logprobs: int | None
    json_schema: str
    values: Mapping[str, Any]

    @property
    def counts(self) -> dict[str, int]:
        """By the name of their parameter: how many choices are returned, and, if more, how many sequences run."""
        counts = {"n": self.n, "best_of": self.best_of, "beam_width": self.beam_width}
        return {name: count for name, count in counts.items() if count}

    def sampling(
        self, max_tokens: int, seed: int, special_tokens: Mapping[str, int], defaults: SamplingDefaults
    ) -> SamplingParams:
        """The final sampling parameters of one prompt; `defaults` are the model's, for parameters that were left out.

        A stop string that is the text of a special token stops at that token too, which has no text in an answer.
        """
        min_tokens = self.values["min_tokens"]
        if min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {min_tokens}, which is more than the {max_tokens} tokens that may be generated.",
                param="min_tokens",
                code="invalid_value",
            )
        given = {name: self.values[name] for name in _SAMPLING}
        by_text = [special_tokens[text] for text in given["stop"] if text in special_tokens]
        given["stop_token_ids"] = tuple(dict.fromkeys([*given["stop_token_ids"], *by_text]))
        # A beam search draws no tokens: the model's temperature and truncation do not apply to it.
        neutral = _OF_DRAWING if self.beam_width else {}
        for name in SAMPLING_DEFAULTS:
            value = self.values[name]
            given[name] = neutral.get(name, getattr(defaults, name)) if value is None else value
        if self.beam_width:
            given |= {name: self.values[name] for name in _OF_BEAMS if self.values[name] is not None}
            given["beam_width"] = self.beam_width
        if self.json_schema:
            given["json_schema"] = self.json_schema
        if self.top_logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return SamplingParams(max_tokens=max_tokens, seed=seed, n=self.n, best_of=self.best_of, **given)


def read_options(values: Mapping[str, Any]) -> Options:
    """The options among the values that `parameters.read` returned. Raises InvalidRequest."""
    if values["stream_options"] is not None and not values["stream"]:
        raise _refused("stream_options", "stream_options is allowed only with stream: true.")
    if values["background"] and not values["stream"]:
        raise _refused(
            "background",
            "background is true, which is allowed only with stream: true: it is streams that can be taken up again.",
        )
    old, new = values["max_tokens"], values["max_completion_tokens"]
    if old is not None and new is not None and old != new:
        raise _refused(
            "max_completion_tokens", f"max_tokens is {old} and max_completion_tokens is {new}; give one of them."
        )
    return Options(
        model=values["model"],
        stream=values["stream"],
        include_usage=bool(values["stream_options"]),
        n=values["n"],
        best_of=_best_of(values),
        beam_width=_beam_width(values),
        max_tokens=new if new is not None else old,
        seed=values["seed"],
        cache_salt=values["cache_salt"],
        background=values["background"],
        priority=values["priority"],
        timeout_s=values["timeout"],
        top_logprobs=_top_logprobs(values),
        json_schema=_json_schema(values),
        values=values,
    )


def _json_schema(values: Mapping[str, Any]) -> str:
    schema: str = values["response_format"]
    for name in ("use_beam_search", "ignore_eos", "min_tokens") if schema else ():
        if values[name]:
            raise _refused(
                name,
                f"{name} is {shown(values[name])}, which does not go with a response_format: an answer ends where its "
                "JSON does.",
            )
    return schema


def _best_of(values: Mapping[str, Any]) -> int:
    best_of, n = values["best_of"], values["n"]
    if best_of is None:
        return 0
    if values["use_beam_search"]:
        raise _refused(
            "best_of",
            f"best_of is {best_of}, but with use_beam_search it is beam_width that says how many sequences run.",
        )
    if best_of < n:
        raise _refused("best_of", f"best_of is {best_of}, which is less than n = {n}; give at least n.")
    if best_of > n and values["stream"]:
        raise _refused(
            "best_of",
            f"best_of {best_of} with n {n} cannot be streamed: which choices are the best is known at the end only. "
            "Leave out stream, or let best_of be n.",
        )
    return int(best_of)


def _top_logprobs(values: Mapping[str, Any]) -> int | None:
    """As chats say it with two parameters, or completions with one."""
    asked, top = values["logprobs"], values.get("top_logprobs")
    if asked is None or asked is False:
        if top:
            raise _refused("top_logprobs", f"top_logprobs is {top}, which is allowed only with logprobs: true.")
        return None
    if values["use_beam_search"]:
        raise _refused(
            "logprobs", "logprobs is not supported with use_beam_search: a beam's score is all it has; leave it out."
        )
    return int(top or 0) if asked is True else int(asked)


def _beam_width(values: Mapping[str, Any]) -> int:
    if not values["use_beam_search"]:
        for name in _OF_BEAMS:
            if values[name] is not None:
                raise _refused(
                    name, f"{name} is {shown(values[name])}, which is allowed only with use_beam_search: true."
                )
        return 0
    if values["stream"]:
        raise _refused(
            "use_beam_search",
            "use_beam_search true cannot be streamed: which beams are the best is known at the end only. Leave out "
            "stream.",
        )
    for name, neutral in _OF_DRAWING.items():
        if values[name] not in (None, neutral):
            raise _refused(
                name,
                f"{name} is {shown(values[name])}, but use_beam_search draws no tokens; leave out {name}, or let it be "
                f"{neutral}.",
            )
    if values["stop"]:
        raise _refused(
            "stop",
            f"stop has {len(values['stop'])} strings, but stop strings are not supported with use_beam_search; leave "
            "out stop.",
        )
    if values["stop_token_ids"]:
        raise _refused("stop_token_ids", "stop_token_ids is not supported with use_beam_search; leave it out.")
    n: int = values["n"]
    width = values["beam_width"]
    if width is None:
        return max(n, DEFAULT_BEAM_WIDTH)
    if width < n:
        raise _refused("beam_width", f"beam_width is {width}, which is less than n = {n}; give at least n.")
    return int(width)


def _refused(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")

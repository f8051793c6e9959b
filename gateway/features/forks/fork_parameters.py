"""The parameters of a fork: its place, and those of a new call that do not belong to its prompt or its grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quire.gateway.api.labels import LABELS
from quire.gateway.api.parameters import CHAT, COMPLETIONS, Body
from quire.gateway.stream.sse import EventId
from quire.shared.config.schema_parts import Schema, any_of
from quire.shared.config.validators import Integer, Text, wrong
from quire.shared.protocol.sampling_params import MAX_CHOICES, MAX_OUTPUT_TOKENS, Parameter

MAX_CONTINUATION = 1_048_576


class ForkPlace:
    """A number of tokens, or the id of an event of the stream."""

    schema = any_of(Integer(0, MAX_OUTPUT_TOKENS), Text(1, 24))

    def __call__(self, name: str, value: Any) -> int | EventId:
        if type(value) is int:
            return Integer(0, MAX_OUTPUT_TOKENS)(name, value)
        place = EventId.parse(value) if type(value) is str else None
        if place is None:
            raise wrong(name, self, value)
        return place

    def __str__(self) -> str:
        return f"an integer from 0 to {MAX_OUTPUT_TOKENS}, or the id of an event as a string"


OF_THE_FORK: dict[str, Parameter] = {
    "at": Parameter(
        read=ForkPlace(),
        help="the number of tokens of the answer that the fork keeps, or the id of an event of its stream; by default "
        "all so far",
    ),
    "choice": Parameter(
        read=Integer(0, MAX_CHOICES * 2048), default=0, help="the choice of the answer, if it has several"
    ),
    "continuation": Parameter(
        read=Text(0, MAX_CONTINUATION), default="", help="text that follows the tokens that the fork keeps"
    ),
}
# Parameters of a new call under the same names. The fork has the values of the first call for those of sampling.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "include_stop_str_in_output",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "repetition_detection",
)
# The sampling parameters that a fork has from the first call alone. The tokens that it keeps count for its reasoning.
INHERITED = ("grammar", "skip_special_tokens", "thinking_token_budget", "thinking_start", "thinking_end")
_OTHERS = (
    "n",
    "max_tokens",
    "seed",
    "stream",
    "stream_options",
    "background",
    "timeout",
    "priority",
    "logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    *LABELS,
)


def _table(table: Mapping[str, Parameter], *more: str) -> dict[str, Parameter]:
    return OF_THE_FORK | {name: table[name] for name in (*SAMPLING, *_OTHERS, *more)}


# By the name of the dialect.
FORKS = {
    "chat": _table(CHAT, "max_completion_tokens", "top_logprobs"),
    "completion": _table(COMPLETIONS, "max_completion_tokens"),
    "response": {
        **{name: parameter for name, parameter in OF_THE_FORK.items() if name != "choice"},
        "max_output_tokens": Parameter(
            read=Integer(1, MAX_OUTPUT_TOKENS), help="by default what the first response has left; reasoning counts"
        ),
        **{name: CHAT[name] for name in (*SAMPLING, "seed", "stream", "timeout", "priority", *LABELS)},
    },
}


class NotStored:
    """No response that is a fork is stored."""

    schema: ClassVar[Schema] = {"const": False}

    def __call__(self, name: str, value: Any) -> bool:
        if value is not False:
            raise wrong(name, self, value)
        return False

    def __str__(self) -> str:
        return "false: a fork is not stored"


# Those of a new response that a fork of the previous response has besides.
OF_CREATION: dict[str, Parameter] = {
    "previous_response_id": Parameter(read=Text(1, 64), required=True, help="the stored response that is forked"),
    "model": replace(CHAT["model"], required=False, help="that of the previous response"),
    "input": Parameter(
        read=Text(0, MAX_CONTINUATION), default="", help="text that follows the tokens that the fork keeps"
    ),
    "store": Parameter(read=NotStored(), required=True, help="must be false: a fork is not stored"),
}
# Of POST /v1/responses with `at`.
PREVIOUS: dict[str, Parameter] = OF_CREATION | {
    **{name: parameter for name, parameter in FORKS["response"].items() if name != "continuation"},
    "at": replace(OF_THE_FORK["at"], required=True, help=OF_THE_FORK["at"].help.partition(";")[0]),
}
BODIES = {
    "ChatCompletionForkRequest": Body(FORKS["chat"], {}, ()),
    "CompletionForkRequest": Body(FORKS["completion"], {}, ()),
    "ResponseForkRequest": Body(FORKS["response"], {}, ()),
    "PreviousResponseForkRequest": Body(PREVIOUS, {}, ()),
}

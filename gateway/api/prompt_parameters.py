"""The parameters of a call about its prompts and about what its answer shows of them, as in vLLM, and their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.gateway.errors.api_errors import refused
from quire.gateway.model.prompt_form import PromptForm
from quire.gateway.stream.answer_options import AnswerOptions
from quire.shared.config.validators import Flag, Integer, OneOf, wrong
from quire.shared.protocol.sampling_params import MAX_OUTPUT_TOKENS, Parameter, SamplingParams

# Largest number of tokens and log-probabilities of prompts in the answer to one call. A log-probability takes 8 bytes
# in the message of a worker, and up to 70 in the answer.
MAX_PROMPT_VALUES = 2**21
# The limit of a stream is lower, because the events of a prompt are written at once.
MAX_STREAMED_VALUES = 2**16
SIDES = ("left", "right")


class TruncatedLength:
    """A number of tokens, or -1."""

    def __call__(self, name: str, value: Any) -> int:
        if type(value) is not int or value == 0:
            raise wrong(name, self, value)
        return Integer(-1, MAX_OUTPUT_TOKENS)(name, value)

    def __str__(self) -> str:
        return f"an integer from 1 to {MAX_OUTPUT_TOKENS}, or -1"


OF_BOTH: dict[str, Parameter] = {
    "truncate_prompt_tokens": Parameter(
        read=TruncatedLength(),
        help="extension, as in vLLM: a longer prompt loses its first tokens; -1 stands for what fits into the context "
        "with the answer",
    ),
    "truncation_side": Parameter(
        read=OneOf(SIDES),
        default="left",
        kind="`left` or `right`",
        requires="truncate_prompt_tokens",
        help="extension, as in vLLM: where a prompt that is too long loses tokens. Only with `truncate_prompt_tokens`",
    ),
    "return_token_ids": Parameter(
        read=Flag(),
        default=False,
        excludes={"use_beam_search": ""},
        help="extension, as in vLLM: the answer has `prompt_token_ids`, and `token_ids` in each choice. Not with "
        "`use_beam_search`",
    ),
    "return_tokens_as_token_ids": Parameter(
        read=Flag(),
        default=False,
        help="extension, as in vLLM: log-probabilities name tokens `token_id:5` instead of by their texts",
    ),
}
_SPECIAL = "extension, as in vLLM: the tokenizer adds its special tokens, such as one for the beginning, to a text"
OF_COMPLETIONS: dict[str, Parameter] = {
    "echo": Parameter(
        read=Flag(),
        default=False,
        help="the text of a choice begins with the prompt; with `logprobs` the prompt has "
        "[log-probabilities](#scoring-prompts), too",
    ),
    "add_special_tokens": Parameter(read=Flag(), default=True, help=_SPECIAL),
}
OF_CHATS: dict[str, Parameter] = {
    "add_special_tokens": Parameter(
        read=Flag(), default=False, help=f"{_SPECIAL}. Chat templates write these tokens themselves"
    ),
    "add_generation_prompt": Parameter(
        read=Flag(),
        default=True,
        help="extension, as in vLLM: the prompt ends with the beginning of an answer of the assistant",
    ),
    "continue_final_message": Parameter(
        read=Flag(),
        default=False,
        help="extension, as in vLLM: the answer continues the last message of the chat. Not with "
        "`add_generation_prompt: true`",
    ),
}


def read_prompt_form(given: Mapping[str, Any]) -> PromptForm:
    """The form of prompts that the parameters ask for. Raises InvalidRequest."""
    continues = given.get("continue_final_message", False)
    if continues and given.get("add_generation_prompt", False):
        raise refused(
            "continue_final_message",
            "continue_final_message and add_generation_prompt cannot both be true: a chat ends either within its last "
            "message or with the beginning of a new one.",
        )
    return PromptForm(
        add_special_tokens=given.get("add_special_tokens"),
        add_generation_prompt=given.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        truncate_prompt_tokens=given.get("truncate_prompt_tokens"),
        truncation_side=given.get("truncation_side", "left"),
    )


def read_answer(given: Mapping[str, Any], continuous_usage: bool) -> AnswerOptions:
    """The options of the answer, without the fingerprint of the system."""
    logprobs = given.get("logprobs")
    if type(logprobs) is bool:  # a chat
        logprobs = given.get("top_logprobs", 0) if logprobs else None
    return AnswerOptions(
        echo=given.get("echo", False),
        logprobs=-1 if logprobs is None else logprobs,
        prompt_logprobs=given.get("prompt_logprobs", -1),
        return_token_ids=given.get("return_token_ids", False),
        return_tokens_as_token_ids=given.get("return_tokens_as_token_ids", False),
        skip_special_tokens=given.get("skip_special_tokens", True),
        continues_message=given.get("continue_final_message", False),
        continuous_usage=continuous_usage,
    )


def of_the_prompt(answer: AnswerOptions) -> dict[str, Any]:
    """The sampling parameters with which a worker reports what the answer shows of the prompt."""
    echoed = answer.logprobs if answer.echo else -1
    return {"prompt_logprobs": max(answer.prompt_logprobs, echoed), "returns_prompt": answer.needs_prompt}


def check_no_tokens(name: str, params: SamplingParams, answer: AnswerOptions) -> None:
    """Check that a call with `max_tokens` 0, which it calls `name`, has something to answer. Raises InvalidRequest."""
    if params.max_tokens:
        return
    if not answer.echo and answer.prompt_logprobs < 0:
        raise refused(name, f"{name} is 0, which is allowed only with echo or prompt_logprobs; give at least 1.")
    if not params.is_streamed:
        ranking = "use_beam_search" if params.beam_width else "best_of"
        raise refused(ranking, f"{ranking} is not supported with {name} 0, because there are no answers to rank.")


def check_prompt_size(answer: AnswerOptions, n: int, prompts: Sequence[Sequence[int]], is_stream: bool) -> None:
    """Check that what the answer shows of the prompts has a bounded size. Raises InvalidRequest."""
    if not answer.needs_prompt:
        return
    echoed = answer.logprobs if answer.echo else -1
    per_token = 3 + max(0, echoed) + max(0, answer.prompt_logprobs)
    values = n * per_token * sum(map(len, prompts))
    limit = MAX_STREAMED_VALUES if is_stream and echoed >= 0 else MAX_PROMPT_VALUES
    if values > limit:
        name = next(one for one in ("prompt_logprobs", "echo", "return_token_ids") if _is_asked(answer, one))
        where = " in a stream" if limit == MAX_STREAMED_VALUES else ""
        raise refused(
            name,
            f"{name} with these prompts, alternatives and n = {n} makes up to {values} values; one answer has at most "
            f"{limit}{where}. Send shorter or fewer prompts, or ask for fewer alternatives.",
        )


def _is_asked(answer: AnswerOptions, name: str) -> bool:
    value: bool | int = getattr(answer, name)
    return value >= 0 if name == "prompt_logprobs" else bool(value)

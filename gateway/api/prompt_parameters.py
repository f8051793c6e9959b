"""The parameters of a call about its prompts and about what its answer shows of them, as in vLLM, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.gateway.errors.api_errors import refused
from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.config.schema_parts import any_of
from quire.shared.config.validators import Flag, Integer, OneOf, wrong
from quire.shared.protocol.sampling_params import MAX_OUTPUT_TOKENS, Parameter

# Largest number of tokens and log-probabilities of prompts in the answer to one call. A log-probability takes 8 bytes
# in the message of a worker, and up to 70 in the answer.
MAX_PROMPT_VALUES = 2**21
# The limit of a stream is lower, because the events of a prompt are written at once.
MAX_STREAMED_VALUES = 2**16
SIDES = ("left", "right")


class TruncatedLength:
    """A number of tokens, or -1."""

    schema = any_of({"const": -1}, Integer(1, MAX_OUTPUT_TOKENS))

    def __call__(self, name: str, value: Any) -> int:
        if type(value) is not int or value == 0:
            raise wrong(name, self, value)
        return Integer(-1, MAX_OUTPUT_TOKENS)(name, value)

    def __str__(self) -> str:
        return f"an integer from 1 to {MAX_OUTPUT_TOKENS}, or -1"


OF_PROMPTS: dict[str, Parameter] = {
    "truncate_prompt_tokens": Parameter(
        read=TruncatedLength(),
        help="extension, as in vLLM: a longer prompt loses its first tokens; -1 stands for what fits into the context "
        "with the answer",
    ),
    "truncation_side": Parameter(
        read=OneOf(SIDES),
        default="left",
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


def check_prompt_size(about: CallMetadata, prompts: Sequence[Sequence[int]], is_stream: bool) -> None:
    """Check that what the answer shows of the prompts has a bounded size. Raises InvalidRequest."""
    if not about.needs_prompt:
        return
    echoed = about.logprobs if about.echoes_prompt else -1
    per_token = 3 + max(0, echoed) + max(0, about.prompt_logprobs)
    values = about.n * per_token * sum(map(len, prompts))
    limit = MAX_STREAMED_VALUES if is_stream and echoed >= 0 else MAX_PROMPT_VALUES
    if values > limit:
        name = "echo" if about.echoes_prompt else "return_token_ids"
        name = "prompt_logprobs" if about.prompt_logprobs >= 0 else name
        where = " in a stream" if limit == MAX_STREAMED_VALUES else ""
        raise refused(
            name,
            f"{name} with these prompts, alternatives and n = {about.n} makes up to {values} values; one answer has at "
            f"most {limit}{where}. Send shorter or fewer prompts, or ask for fewer alternatives.",
        )

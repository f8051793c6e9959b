"""The parameters of a call that say what its answer contains, besides the text of the choices.

The metadata of the call has these options, so that any gateway renders the same answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from quire.shared.config.validators import Flag, Integer, Text, fixed_array
from quire.shared.protocol.logprobs import MAX_TOP_LOGPROBS

MAX_FINGERPRINT = 64


class AnswerOptions(NamedTuple):
    """The contents of an answer.

    echo: the prompt is the beginning of the text. logprobs: number of alternatives per token; -1: no log-probabilities.
    prompt_logprobs: the same for the field `prompt_logprobs`. return_token_ids: token ids of prompt and answer.
    return_tokens_as_token_ids: log-probabilities name tokens by their ids. skip_special_tokens: special tokens have no
    text. continues_message: the answer continues the last message of a chat. continuous_usage: events of the stream
    have the usage so far. system_fingerprint: of the server when the call was accepted.
    """

    echo: bool = False
    logprobs: int = -1
    prompt_logprobs: int = -1
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    skip_special_tokens: bool = True
    continues_message: bool = False
    continuous_usage: bool = False
    system_fingerprint: str = ""

    @property
    def needs_prompt(self) -> bool:
        """True if the answer has the prompt's text, token ids or log-probabilities."""
        return self.echo or self.return_token_ids or self.prompt_logprobs >= 0


_top = Integer(-1, MAX_TOP_LOGPROBS)
_checks: dict[str, Any] = {name: Flag() for name in AnswerOptions._fields} | {
    "logprobs": _top,
    "prompt_logprobs": _top,
    "system_fingerprint": Text(0, MAX_FINGERPRINT),
}


def read_answer_options(name: str, value: Any) -> AnswerOptions:
    """Check the options in decoded metadata. Raises InvalidValue."""
    values = fixed_array(name, value, len(_checks))
    return AnswerOptions(
        *(check(f"{name}.{key}", one) for (key, check), one in zip(_checks.items(), values, strict=True))
    )

"""The prompts of a call that takes one or several, as text or as token ids."""

from __future__ import annotations

from typing import Any

from quire.gateway.errors.api_errors import invalid, refused
from quire.gateway.model.renderer import Prompt
from quire.shared.config.schema_parts import COUNT, TEXT, any_of, array

_ONE = (TEXT | {"minLength": 1}, array(COUNT, low=1))
# What `read_prompts` accepts.
PROMPTS_SCHEMA = any_of(*_ONE, array(any_of(*_ONE), low=1))


def read_prompts(value: Any, max_prompts: int, vocab_size: int, param: str = "prompt") -> list[tuple[str, Prompt]]:
    """Return the prompts of a completion call, each with its name for errors. param: the name of the parameter.

    A string, an array of token ids, or an array of strings and arrays of token ids. Raises InvalidRequest.
    """
    forms = "a string, an array of token ids, or an array of strings and arrays of token ids"
    if type(value) is str:
        prompts: list[tuple[str, Prompt]] = [(param, value)]
    elif type(value) is not list:
        raise invalid(param, forms, value)
    elif value and type(value[0]) is int:
        prompts = [(param, value)]
    else:
        if len(value) > max_prompts:
            raise refused(
                param, f"{param} has {len(value)} elements; this server allows at most {max_prompts} in one call."
            )
        prompts = [(f"{param}[{index}]", prompt) for index, prompt in enumerate(value)]
    if not prompts:
        raise refused(param, f"{param} is empty.", code="empty_prompt")
    for name, prompt in prompts:
        if type(prompt) not in (str, list):
            raise invalid(name, "a string or an array of token ids", prompt)
        if not prompt:
            raise refused(name, f"{name} is empty.", code="empty_prompt")
        if isinstance(prompt, list):
            _check_token_ids(name, prompt, vocab_size)
    return prompts


def _check_token_ids(name: str, token_ids: list[Any], vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise invalid(f"{name}[{index}]", f"a token id from 0 to {vocab_size - 1}", token_id)

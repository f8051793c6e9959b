"""The parameters of `/tokenize` and `/detokenize`, in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.gateway.api.conversation import read_conversation
from quire.gateway.api.parameters import MESSAGES, OF_THE_CHAT, Body, read
from quire.gateway.errors.api_errors import invalid, refused
from quire.gateway.model.conversation import Conversation
from quire.shared.config.validators import Flag, Text, TokenIds
from quire.shared.protocol.sampling_params import Parameter

_MODEL = Parameter(read=Text(), default="", help="the served name; by default the model of this server")
# More tokens than the largest body has.
MAX_TOKENS = 64 * 1024 * 1024

TOKENIZE: dict[str, Parameter] = {
    "model": _MODEL,
    "prompt": Parameter(read=Text(), default="", help="the text; either `prompt` or `messages`"),
    "messages": Parameter(
        read=MESSAGES.read,
        kind=MESSAGES.kind,
        schema=MESSAGES.schema,
        help="a conversation, as in a chat; either `prompt` or `messages`",
    ),
    "add_special_tokens": Parameter(
        read=Flag(),
        help="with the special tokens that the tokenizer puts around a text; by default true for `prompt`, and false "
        "for `messages`, whose template writes its own",
    ),
    "add_generation_prompt": Parameter(
        read=Flag(),
        default=True,
        requires="messages",
        help="only with `messages`: end with the beginning of an answer, as a chat does",
    ),
    "continue_final_message": Parameter(
        read=Flag(),
        default=False,
        requires="messages",
        help="only with `messages`: end within the last message. Not with `add_generation_prompt: true`",
    ),
    "tools": replace(
        OF_THE_CHAT["tools"],
        requires="messages",
        excludes={},
        help="only with `messages`: the functions of a chat, as the model is [told](#tools) about them",
    ),
    "chat_template_kwargs": replace(
        OF_THE_CHAT["chat_template_kwargs"],
        requires="messages",
        help="only with `messages`: variables for the chat template, such as `enable_thinking` or `reasoning_effort`",
    ),
    "return_token_strs": Parameter(
        read=Flag(),
        default=False,
        help="also return `token_strs`: the entries of the vocabulary, as the tokenizer has them",
    ),
}
DETOKENIZE: dict[str, Parameter] = {
    "model": _MODEL,
    "tokens": Parameter(
        read=TokenIds(MAX_TOKENS, high=None), required=True, kind="array of token ids", help="the tokens, in order"
    ),
}
# By the name of the body's schema in /openapi.json.
BODIES = {"TokenizeRequest": Body(TOKENIZE), "DetokenizeRequest": Body(DETOKENIZE)}


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A text, or a conversation, to be tokenized. Exactly one of them is not None.

    add_special_tokens: to the text.
    """

    model: str
    prompt: str | None
    conversation: Conversation | None
    add_special_tokens: bool
    return_token_strs: bool


def read_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Check the body of a call of `/tokenize`. Raises InvalidRequest."""
    given = read(body, TOKENIZE)
    if ("prompt" in given) == ("messages" in given):
        raise refused("prompt", "Give either prompt or messages.", code="missing_required_parameter")
    return TokenizeRequest(
        model=given.get("model", ""),
        prompt=given.get("prompt"),
        conversation=read_conversation(given) if "messages" in given else None,
        add_special_tokens=given.get("add_special_tokens", True),
        return_token_strs=given.get("return_token_strs", False),
    )


def read_detokenize(body: Mapping[str, Any], vocab_size: int) -> tuple[str, list[int]]:
    """Return the model and the tokens of a call of `/detokenize`. Raises InvalidRequest."""
    given = read(body, DETOKENIZE)
    tokens = list(given["tokens"])
    for index, token_id in enumerate(tokens):
        if token_id >= vocab_size:
            raise invalid(f"tokens[{index}]", f"a token id from 0 to {vocab_size - 1}", token_id)
    return given.get("model", ""), tokens

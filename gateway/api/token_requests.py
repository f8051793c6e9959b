"""The parameters of `/tokenize` and `/detokenize`, in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.gateway.api.chat_messages import read_messages
from quire.gateway.api.parameters import MESSAGES, read
from quire.gateway.errors.api_errors import invalid, refused
from quire.shared.sampling_params import Parameter
from quire.shared.text.chat_template import Message
from quire.shared.validators import Flag, Text, TokenIds

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
        help="only with `messages`: end with the beginning of an answer, as a chat does",
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


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A text, or a conversation, to be tokenized. Exactly one of them is not None."""

    model: str
    prompt: str | None
    messages: list[Message] | None
    add_special_tokens: bool
    add_generation_prompt: bool
    return_token_strs: bool


def read_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Checks the body of a call of `/tokenize`. Raises InvalidRequest."""
    given = read(body, TOKENIZE)
    if ("prompt" in given) == ("messages" in given):
        raise refused("prompt", "Give either prompt or messages.", code="missing_required_parameter")
    is_chat = "messages" in given
    if not is_chat and "add_generation_prompt" in given:
        raise refused("add_generation_prompt", "add_generation_prompt is allowed only with messages; leave it out.")
    return TokenizeRequest(
        model=given.get("model", ""),
        prompt=given.get("prompt"),
        messages=read_messages(given["messages"]) if is_chat else None,
        add_special_tokens=given.get("add_special_tokens", not is_chat),
        add_generation_prompt=given.get("add_generation_prompt", True),
        return_token_strs=given.get("return_token_strs", False),
    )


def read_detokenize(body: Mapping[str, Any], vocab_size: int) -> tuple[str, list[int]]:
    """The model and the tokens of a call of `/detokenize`. Raises InvalidRequest."""
    given = read(body, DETOKENIZE)
    tokens = list(given["tokens"])
    for index, token_id in enumerate(tokens):
        if token_id >= vocab_size:
            raise invalid(f"tokens[{index}]", f"a token id from 0 to {vocab_size - 1}", token_id)
    return given.get("model", ""), tokens

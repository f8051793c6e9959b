"""Prompts to token ids: the event loop goes on while a long prompt is tokenized, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.gateway.api.chat_messages import Message
from quire.gateway.api.errors import InvalidRequest
from quire.gateway.api.parameters import invalid, shown
from quire.gateway.model.schema_check import Schemas
from quire.gateway.model.served_model import ServedModel
from quire.shared.text.chat_template import TemplateFailure
from quire.shared.text.json_schema import SchemaError

# No tokenizer in use packs more characters into a token on average; longer prompts are refused before the work is done.
CHARACTERS_PER_TOKEN = 16
# What takes less time to tokenize than to hand to a thread and back.
SHORT_CHARACTERS = 512
# What a message takes beside its characters: the template writes around it, and also that is tokenized.
MESSAGE_CHARACTERS = 32

Prompt = str | list[int]


class Renderer:
    """Renders and tokenizes for one model."""

    def __init__(self, model: ServedModel, threads: int) -> None:
        self._model = model
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._schemas = Schemas(threads)

    def close(self) -> None:
        self._schemas.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def chat(self, messages: Sequence[Message], limit: int) -> list[int]:
        """The token ids of a conversation, for a context of `limit` tokens. Raises InvalidRequest."""
        if self._model.template is None:
            raise InvalidRequest(
                f"{self._model.name} has no chat template; use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        characters = sum(_characters(message["content"]) for message in messages)
        _check_length("messages", characters, limit)
        around = sum(MESSAGE_CHARACTERS + len(message.get("name", "")) for message in messages)
        return await self._run(characters + around, self._render_chat, messages)

    async def prompt(self, name: str, prompt: Prompt, limit: int) -> list[int]:
        """The token ids of a plain prompt, with the special tokens that the tokenizer puts around it."""
        if isinstance(prompt, list):
            return prompt
        _check_length(name, len(prompt), limit)
        return await self._run(len(prompt), self._encode, prompt, True)

    async def check_schema(self, schema: str) -> None:
        """Raises InvalidRequest for a JSON schema that no answer can be made to follow."""
        if not schema:
            return
        if not self._model.eos_token_ids:
            raise InvalidRequest(
                f"response_format needs a model with an end token, and {self._model.name} has none.",
                param="response_format",
                code="invalid_value",
            )
        try:
            await self._schemas.check(schema)
        except SchemaError as error:
            raise InvalidRequest(
                f"response_format.json_schema.schema cannot be followed: {error}.",
                param="response_format.json_schema.schema",
                code="invalid_value",
            ) from error

    async def _run(self, characters: int, function: Any, *arguments: Any) -> list[int]:
        if characters <= SHORT_CHARACTERS:
            short: list[int] = function(*arguments)
            return short
        ids: list[int] = await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        return ids

    def _render_chat(self, messages: Sequence[Message]) -> list[int]:
        assert self._model.template is not None
        try:
            text = self._model.template.render(messages)
        except TemplateFailure as error:
            raise InvalidRequest(
                f"The chat template of {self._model.name} refuses these messages: {str(error)[:500]}.",
                param="messages",
                code="template_error",
            ) from error
        # The template writes its own beginning-of-sequence token.
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._model.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def read_prompts(value: Any, max_prompts: int, vocab_size: int) -> list[tuple[str, Prompt]]:
    """The prompts of a completion call, each with the name that errors call it by.

    A string, an array of token ids, or an array of strings and arrays of token ids. Raises InvalidRequest.
    """
    forms = "a string, an array of token ids, or an array of strings and arrays of token ids"
    if type(value) is str:
        found: list[tuple[str, Prompt]] = [("prompt", value)]
    elif type(value) is not list:
        raise invalid("prompt", value, forms)
    elif value and type(value[0]) is int:
        found = [("prompt", value)]
    else:
        if len(value) > max_prompts:
            raise InvalidRequest(
                f"prompt has {len(value)} prompts; this server allows at most {max_prompts} in one call.",
                param="prompt",
                code="invalid_value",
            )
        found = [(f"prompt[{index}]", prompt) for index, prompt in enumerate(value)]
    if not found:
        raise InvalidRequest("prompt is empty.", param="prompt", code="empty_prompt")
    for name, prompt in found:
        if type(prompt) not in (str, list):
            raise invalid(name, prompt, "a string or an array of token ids")
        if not prompt:
            raise InvalidRequest(f"{name} is empty.", param=name, code="empty_prompt")
        if isinstance(prompt, list):
            _check_token_ids(name, prompt, vocab_size)
    return found


def _check_token_ids(name: str, token_ids: list[Any], vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name}[{index}] must be a token id from 0 to {vocab_size - 1}, not {shown(token_id)}.",
                param=f"{name}[{index}]",
                code="invalid_value",
            )


def _characters(content: str | list[dict[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _check_length(name: str, characters: int, limit: int) -> None:
    if characters > CHARACTERS_PER_TOKEN * limit:
        raise InvalidRequest(
            f"{name} has {characters} characters, which is more than the maximum context length of {limit} tokens can "
            "hold. Shorten it.",
            param=name,
            code="context_length_exceeded",
        )

"""Prompts to token ids. A thread tokenizes long prompts, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.gateway.api.errors import refused
from quire.gateway.model.schema_check import Schemas
from quire.gateway.model.served_model import ServedModel
from quire.shared.text.chat_template import Message, TemplateFailure
from quire.shared.text.json_schema import SchemaError

# Upper bound of the average number of characters per token, for any tokenizer in use. A prompt with more than this
# number of characters for each token of the context is refused without tokenizing it.
CHARACTERS_PER_TOKEN = 16
# Tokenizing a text of this length takes less time than handing it to a thread and back.
SHORT_CHARACTERS = 512
# Number of characters that a chat template writes around one message; the tokenizer reads these too.
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
            raise refused(
                "messages", f"{self._model.name} has no chat template; use /v1/completions.", code="no_chat_template"
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
        """Check that answers can follow a JSON schema. Raises InvalidRequest."""
        if not schema:
            return
        if not self._model.eos_token_ids:
            raise refused(
                "response_format", f"response_format needs a model with an end token, and {self._model.name} has none."
            )
        try:
            await self._schemas.check(schema)
        except SchemaError as error:
            name = "response_format.json_schema.schema"
            raise refused(name, f"{name} cannot be followed: {error}.") from error

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
            raise refused(
                "messages",
                f"The chat template of {self._model.name} refuses these messages: {str(error)[:500]}.",
                code="template_error",
            ) from error
        # The template writes its own beginning-of-sequence token.
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._model.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def _characters(content: str | list[dict[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _check_length(name: str, characters: int, limit: int) -> None:
    if characters > CHARACTERS_PER_TOKEN * limit:
        raise refused(
            name,
            f"{name} has {characters} characters, which is more than the maximum context length of {limit} tokens can "
            "hold. Shorten it.",
            code="context_length_exceeded",
        )

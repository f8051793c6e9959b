"""Prompts to token ids. A thread tokenizes long prompts, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from tokenizers import Encoding

from quire.gateway.errors.api_errors import ApiError, refused, too_long
from quire.gateway.features.grammars.grammar_check import GrammarTrials
from quire.gateway.features.images.images import (
    Image,
    Images,
    ImageSender,
    Part,
    find_images,
    place_images,
    take_images,
    with_placeholders,
)
from quire.gateway.features.tools.formats import REASONING_FORMATS
from quire.gateway.features.tools.tool_grammars import ToolGrammars
from quire.gateway.model.continued_message import render_continued
from quire.gateway.model.conversation import Conversation
from quire.gateway.model.served_model import ServedModel
from quire.gateway.output.tools import Tool
from quire.shared.protocol.messages import ImageRef
from quire.shared.text.chat_template import Message, TemplateFailure
from quire.shared.text.control_tokens import ControlTokens, pieces
from quire.shared.text.grammar import GrammarVocabulary
from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.panics import faults_as

# Upper bound of the average number of characters per token, for any tokenizer in use. A prompt with more than this
# number of characters for each token of the context is refused without tokenizing it.
CHARACTERS_PER_TOKEN = 16
# Tokenizing a text of this length takes less time than handing it to a thread and back.
SHORT_CHARACTERS = 512
# Number of characters that a chat template writes around one message; the tokenizer reads these too.
MESSAGE_CHARACTERS = 32

Prompt = str | list[int]
T = TypeVar("T")


class RenderedChat(NamedTuple):
    """The prompt of a conversation, as text and as token ids.

    images: those in it; files: by digest. places: the tokens of the prompt that each probe has, too.
    """

    text: str
    token_ids: list[int]
    images: tuple[ImageRef, ...] = ()
    files: Mapping[str, bytes] = {}
    places: tuple[int, ...] = ()


class Renderer:
    """Renders and tokenizes for one model."""

    def __init__(
        self, model: ServedModel, threads: int, divides_control_tokens: bool = True, images: Images | None = None
    ) -> None:
        self.model = model
        self._images = images
        self._sender = ImageSender()
        template = model.template if divides_control_tokens else None
        source = None if template is None else template.source + template.with_tools.source
        marks = {mark for form in REASONING_FORMATS.values() for mark in (form.start, form.end)}
        of_images = () if model.layout is None else (model.layout.placeholder, model.layout.image_token)
        self._control_tokens = None if source is None else ControlTokens.of(model.tokenizer, source, marks, of_images)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        vocabulary = GrammarVocabulary.of(model.tokenizer, model.eos_token_ids, model.vocab_size)
        self._grammars = GrammarTrials(vocabulary, threads)
        self.tool_grammars = ToolGrammars(vocabulary.special_tokens)

    def close(self) -> None:
        self._grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def of(self, sender: ImageSender) -> Renderer:
        """Return the renderer for the calls of a sender, which shares all that this one has."""
        renderer = copy(self)
        renderer._sender = sender
        return renderer

    @property
    def template_takes_tools(self) -> bool:
        """True if the chat template describes tools to the model."""
        return self.model.template is not None and "tools" in self.model.template.with_tools.variables

    @property
    def describes_tools(self) -> bool:
        """True if plain messages describe the tools to the model: no template does, or not in the format of calls."""
        form = self.model.calls
        return not self.template_takes_tools or (form is not None and form.is_described)

    async def images(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[Image]]:
        """Return the messages without the files of images, and the images in their order. Raises InvalidRequest."""
        messages, parts = take_images(messages)
        return messages, await self.read_images(parts)

    async def read_images(self, parts: Sequence[Part], stored_bytes: int = 0) -> list[Image]:
        """Return the images of parts of messages. Raises InvalidRequest, ServerBusy.

        stored_bytes: of stored images of the conversation, for which there is memory then.
        """
        if not parts:
            return await self._images.read_all([], self._sender, stored_bytes) if self._images and stored_bytes else []
        if self.model.layout is None or self._images is None:
            where = parts[0]["where"]
            raise refused(where, f"{where} is an image, and {self.model.name} takes text alone.", code="text_only")
        if self._sender.refusal:
            where = parts[0]["where"]
            raise refused(where, f"{where} is an image, and {self._sender.refusal}.", code="text_only")
        return await self._images.read_all(parts, self._sender, stored_bytes)

    @staticmethod
    def without_images(messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages without the files of their images."""
        return take_images(messages)[0]

    def with_placeholders(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with the placeholder as the text of each image, for contents that become one text."""
        return with_placeholders(messages, self.model.layout)

    async def chat(
        self,
        conversation: Conversation,
        limit: int,
        mark: str = "",
        images: Sequence[Image] = (),
        probes: Sequence[tuple[Conversation, str]] = (),
    ) -> RenderedChat:
        """Return the prompt of a conversation, for a context of `limit` tokens. Raises InvalidRequest.

        mark: the one at which `mark_control_tokens` divided texts. images: those of the conversation. probes: other
        conversations with these images, and their marks.
        """
        messages, tools = conversation.messages, list(map(_as_json, conversation.tools))
        if self.model.template is None:
            raise refused(
                "messages", f"{self.model.name} has no chat template; use /v1/completions.", code="no_chat_template"
            )
        characters = sum(map(_characters, messages))
        _check_length("messages", characters, limit)
        if tools and self.template_takes_tools:
            # Text that the template writes for the tools counts as little as the tags around messages.
            characters += len(json.dumps(tools, ensure_ascii=False))
            _check_length("tools", characters, limit)
        around = sum(MESSAGE_CHARACTERS + len(message.get("name", "")) for message in messages)
        return await self.run(characters + around, self._render_chat, conversation, mark, images, probes)

    async def mark_control_tokens(
        self, messages: Sequence[Message], others: T, limit: int
    ) -> tuple[Sequence[Message], T, str]:
        """Return the messages and further texts for the template, with control tokens divided at a mark; and the mark.

        The mark is empty if there is nothing to divide. limit: of the context in tokens. Raises InvalidRequest.
        """
        if self._control_tokens is None:
            return messages, others, ""
        characters = sum(map(_characters, messages))
        _check_length("messages", characters, limit)
        try:
            return await self.run(characters, self._control_tokens.mark, messages, others)
        except ValueError as error:
            raise refused("messages", f"The texts of messages {error}.") from error

    async def prompt(self, name: str, prompt: Prompt, limit: int, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a plain prompt, with or without the special tokens that the tokenizer adds."""
        if isinstance(prompt, list):
            return prompt
        _check_length(name, len(prompt), limit)
        return await self.run(len(prompt), self._encode, name, [prompt], add_special_tokens)

    async def texts(
        self, named: Sequence[tuple[str, str]], limit: int | None, add_special_tokens: bool
    ) -> list[list[int]]:
        """Return the token ids of texts, with or without the special tokens around each.

        named: each text with its name for errors. limit: of the context in tokens; None if the caller shortens longer
        texts. Raises InvalidRequest.
        """
        for name, text in named:
            if limit is not None:
                _check_length(name, len(text), limit)
        return await self.run(sum(len(text) for _, text in named), self._encode_all, named, add_special_tokens)

    async def check_grammar(self, grammar: str, name: str) -> None:
        """Check that answers can follow a grammar. `name` is the parameter that errors name. Raises InvalidRequest."""
        if not grammar:
            return
        try:
            await self.try_grammar(grammar)
        except GrammarError as error:
            raise refused(name, f"{name} cannot be followed: {error}.") from error

    async def try_grammar(self, grammar: str) -> None:
        """Raise GrammarError if answers cannot follow a grammar."""
        if not self.model.eos_token_ids:
            raise GrammarError(f"it needs a model with an end token, and {self.model.name} has none")
        await self._grammars.check(grammar)

    async def check_follows(self, grammar: str, output: Sequence[int], name: str) -> None:
        """Check that an answer with this grammar can begin with the tokens. Raises InvalidRequest, naming `name`."""
        try:
            await self._grammars.follow(grammar, output, self._decode)
        except GrammarError as error:
            raise refused(name, f"{name} is not possible: {error}.") from error

    async def text(self, token_ids: list[int]) -> str:
        """Return the text of tokens, special tokens included. Tokens that the tokenizer lacks have no text."""
        return await self.run(len(token_ids), self._decode, token_ids)

    async def token_strings(self, token_ids: list[int]) -> list[str]:
        """Return the entries of the vocabulary with these ids; empty for tokens that the tokenizer lacks."""
        entry = self.model.tokenizer.id_to_token
        return await self.run(len(token_ids), lambda: [entry(token_id) or "" for token_id in token_ids])

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function, in a thread if its input is not short. size: of the input, in characters or tokens."""
        if size <= SHORT_CHARACTERS:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments))

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self.model.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _render_chat(
        self,
        conversation: Conversation,
        mark: str,
        images: Sequence[Image],
        probes: Sequence[tuple[Conversation, str]],
    ) -> RenderedChat:
        divided = self._written(conversation, mark, images)
        # The template writes its own beginning-of-sequence token.
        encoding = self._encoding("messages", divided, conversation.add_special_tokens)
        text, token_ids = "".join(divided), list(encoding.ids)
        files = {image.digest: image.data for image in images}
        places: list[int] = []
        if probes:
            ends = list(accumulate((end for _, end in encoding.offsets), max))
            places = [bisect_right(ends, self._common_length(text, *probe, images)) for probe in probes]
        return RenderedChat(text, token_ids, find_images(self.model.layout, token_ids, images), files, tuple(places))

    def _common_length(self, text: str, probe: Conversation, mark: str, images: Sequence[Image]) -> int:
        """Return the number of characters with which a prompt and a probe begin; 0 if the probe tells no place."""
        try:
            other = "".join(self._written(probe, mark, images))
        except ApiError:  # a template may refuse what the probe adds
            return 0
        # Equal texts tell no place: the template leaves out what the probe adds.
        return common_length(text, other) if text != other else 0

    def _written(self, conversation: Conversation, mark: str, images: Sequence[Image]) -> list[str]:
        """Return what the chat template writes of a conversation, divided at the mark. Raises InvalidRequest."""
        assert self.model.template is not None
        messages, tools = conversation.messages, list(map(_as_json, conversation.tools))
        template = self.model.template.chosen(messages, bool(tools))
        render = partial(template.render, tools=tools or None, variables=conversation.template_variables)
        try:
            if conversation.continue_final_message:
                text = render_continued(render, messages)
            else:
                text = render(messages, conversation.add_generation_prompt)
        except TemplateFailure as error:
            raise refused(
                "messages",
                f"The chat template of {self.model.name} refuses these messages: {str(error)[:500].rstrip('.')}.",
                code="template_error",
            ) from error
        return pieces(place_images(self.model.layout, text, images), mark)

    def _encode_all(self, named: Sequence[tuple[str, str]], add_special_tokens: bool) -> list[list[int]]:
        texts = [text for _, text in named]
        try:
            with faults_as(RuntimeError):
                encodings = self.model.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except RuntimeError:  # one by one, for the name of the text
            return [self._encode(name, [text], add_special_tokens) for name, text in named]
        return [encoding.ids for encoding in encodings]

    def _encode(self, name: str, texts: list[str], add_special_tokens: bool) -> list[int]:
        return list(self._encoding(name, texts, add_special_tokens).ids)

    def _encoding(self, name: str, texts: list[str], add_special_tokens: bool) -> Encoding:
        """Tokenize a text in pieces. `name` is the parameter that errors name. Raises InvalidRequest."""

        def fault(reason: str) -> ApiError:
            return refused(
                name, f"The tokenizer of {self.model.name} fails at the text of {name}: {reason}. Change it."
            )

        tokenizer = self.model.tokenizer
        with faults_as(fault):
            if len(texts) == 1:
                return tokenizer.encode(texts[0], add_special_tokens=add_special_tokens)
            encodings = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            return tokenizer.post_process(Encoding.merge(encodings, True), None, add_special_tokens)


def common_length(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _as_json(tool: Tool) -> dict[str, Any]:
    """Return the tool in the form of the OpenAI API, which chat templates expect."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _characters(message: Message) -> int:
    """Return the characters of a message that a template writes."""
    content = message["content"] or ""
    count = len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)
    count += len(message.get("reasoning_content", ""))
    if calls := message.get("tool_calls"):
        count += len(json.dumps(calls, ensure_ascii=False))
    return count


def _check_length(name: str, characters: int, limit: int) -> None:
    if characters > CHARACTERS_PER_TOKEN * limit:
        tokens = math.ceil(characters / CHARACTERS_PER_TOKEN)
        however = f"{name} has {characters} characters, which are at least {tokens} tokens"
        raise too_long(name, limit, tokens, however, f"Please reduce the length of {name}.")

"""`--pinned-prefixes FILE`: prompt prefixes that are computed at start and never evicted from the prefix cache.

The file is TOML with a `[[prefix]]` entry for each: a `name`, exactly one of `text`, `messages` and `token_ids`, and an
optional `cache_salt`. Unknown and wrong fields raise a PrefixError that names file, entry, field, value and remedy.
docs/how-to/prefix-cache.md has an example.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tokenizers import Tokenizer

from quire.shared.process.errors import StartError
from quire.shared.protocol.messages import MAX_SALT_LENGTH, GenerationRequest, SamplingParams
from quire.shared.text.panics import faults_as
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import RequestRefused

if TYPE_CHECKING:
    from quire.shared.text.chat_template import ChatTemplate

log = logging.getLogger(__name__)

FIELDS = ("name", "text", "messages", "token_ids", "cache_salt")
CONTENTS = ("text", "messages", "token_ids")
ROLES = ("system", "user", "assistant")
# Two possible next messages: the tokens that these conversations share are taken to be shared by every continuation.
CONTINUATIONS = ("a", "b")


class PrefixError(StartError):
    """A file of pinned prefixes cannot be used. The message is one line."""


@dataclass(frozen=True, slots=True)
class PinnedPrompt:
    """A named prefix of prompts, shared by requests with the same cache salt."""

    name: str
    token_ids: tuple[int, ...]
    cache_salt: str = ""


def load_prefixes(
    path: Path, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
) -> list[PinnedPrompt]:
    """Read the prefixes of a file, in its order. Raises PrefixError."""
    where = f"--pinned-prefixes {path}"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PrefixError(f"{where}: {error.strerror}; give a TOML file with [[prefix]] entries") from error
    except ValueError as error:  # from tomllib, or for a file that is not UTF-8
        raise PrefixError(f"{where} is not TOML: {error}; correct it there") from error
    if unknown := sorted(content.keys() - {"prefix"}):
        raise PrefixError(f"{where}: unknown key {unknown[0]!r}; entries begin with [[prefix]]")
    entries = content.get("prefix")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise PrefixError(f"{where} has no prefix; add [[prefix]] entries, or leave the setting out")
    reader = _Reader(tokenizer, template, vocab_size)
    prefixes: list[PinnedPrompt] = []
    for number, entry in enumerate(entries, 1):
        try:
            prefixes.append(reader.read(entry))
            if any(prefixes[-1].name == earlier.name for earlier in prefixes[:-1]):
                _refuse("name", prefixes[-1].name, "is the name of an earlier prefix; give each its own")
        except PrefixError as error:
            name = entry.get("name")
            shown = f" ({_shown(name)})" if isinstance(name, str) and name else ""
            raise PrefixError(f"{where}: prefix {number}{shown}: {error}") from error
    return prefixes


def pin_prefixes(engine: Engine, prefixes: Iterable[PinnedPrompt]) -> None:
    """Compute and pin the prefixes. Raises PrefixError for a prefix that is longer than the cache or the context."""
    for prefix in prefixes:
        try:
            pin(engine, prefix.name, prefix.token_ids, prefix.cache_salt)
        except RequestRefused as error:
            raise PrefixError(
                f"{error}; shorten it, or raise --kv-cache-gb (or --num-blocks), or --max-model-len"
            ) from error
        pinned = engine.scheduler.blocks.pinned[-1]
        log.info("pinned prefix %s: %d tokens in %d blocks", prefix.name, pinned.num_tokens, len(pinned.blocks))


def pin(engine: Engine, name: str, token_ids: tuple[int, ...], cache_salt: str = "") -> None:
    """Compute a prefix and protect it from eviction (paper section 4.4). The engine must be idle.

    Raises RequestRefused, naming the prefix, if the prefix cannot fit.
    """
    states, limits = engine.groups.states, engine.limits
    if states is not None and not (limits.prefix_caching and states.can_take(1)):
        raise RequestRefused(f"pinned prefix {name!r}: no slot is left for a snapshot of its state")
    if states is not None and len(token_ids) < limits.block_size:
        raise RequestRefused(f"pinned prefix {name!r}: it is shorter than a block of {limits.block_size} tokens")
    request = GenerationRequest(f"pin-{name}", engine.name, token_ids, SamplingParams(1, temperature=0), cache_salt)
    try:
        engine.add(request, pin_as=name)
    except RequestRefused as error:
        raise RequestRefused(f"pinned prefix {name!r}: {error}") from None
    while request.id in engine.requests:
        engine.step()


class _Reader:
    """Turns entries of the file into token ids, with the tokenizer and the chat template of the model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size

    def read(self, entry: dict[str, Any]) -> PinnedPrompt:
        if unknown := sorted(entry.keys() - set(FIELDS)):
            _refuse(unknown[0], entry[unknown[0]], f"is no field of a prefix; there are {', '.join(FIELDS)}")
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            _refuse("name", name, "must be a string that is not empty; the log calls the prefix by it")
        given = [field for field in CONTENTS if field in entry]
        if len(given) != 1:
            present = " and ".join(given) if given else "none"
            raise PrefixError(f"it has {present} of {', '.join(CONTENTS)}; give exactly one of them")
        salt = entry.get("cache_salt", "")
        if not isinstance(salt, str) or ("cache_salt" in entry and not 1 <= len(salt) <= MAX_SALT_LENGTH):
            _refuse("cache_salt", salt, f"must be a string of 1 to {MAX_SALT_LENGTH} characters; or leave it out")
        value = entry[given[0]]
        if given[0] == "text":
            token_ids = self._text(value)
        elif given[0] == "messages":
            token_ids = self._messages(value)
        else:
            token_ids = self._token_ids(value)
        return PinnedPrompt(name, tuple(token_ids), salt)

    def _text(self, value: Any) -> list[int]:
        if not isinstance(value, str) or not value:
            _refuse("text", value, "must be a string that is not empty")
        return self._encode(value, add_special_tokens=True)

    def _messages(self, value: Any) -> list[int]:
        if not isinstance(value, list) or not value:
            _refuse("messages", value, 'must be an array such as [{role = "system", content = "..."}]')
        for index, message in enumerate(value):
            self._check_message(f"messages[{index}]", message)
        if self._template is None:
            raise PrefixError("messages: the model has no chat template; give text or token_ids instead")
        # Imported here because only pinned conversations need it: Jinja takes a tenth of a second of a start.
        from quire.shared.text.chat_template import TemplateFailure

        try:
            rendered = [
                self._template.render([*value, {"role": "user", "content": said}], add_generation_prompt=False)
                for said in CONTINUATIONS
            ]
        except TemplateFailure as error:
            why = " ".join(str(error).split())[:200]
            raise PrefixError(
                f"messages: the chat template refuses them when a user's message follows: {why}; give the "
                "beginning of a valid conversation, or text"
            ) from error
        first, second = (self._encode(text, add_special_tokens=False) for text in rendered)
        shared = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]
        if not shared:
            raise PrefixError("messages: their continuations have no tokens in common; give text or token_ids")
        return shared

    @staticmethod
    def _check_message(field: str, message: Any) -> None:
        if not isinstance(message, dict):
            _refuse(field, message, 'must be a table such as {role = "system", content = "..."}')
        if unknown := sorted(message.keys() - {"role", "content"}):
            _refuse(f"{field}.{unknown[0]}", message[unknown[0]], "is no field of a message; give role and content")
        if message.get("role") not in ROLES:
            _refuse(f"{field}.role", message.get("role"), f"must be one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str) or not message["content"]:
            _refuse(f"{field}.content", message.get("content"), "must be a string that is not empty")

    def _token_ids(self, value: Any) -> list[int]:
        if not isinstance(value, list) or not value:
            _refuse("token_ids", value, "must be an array of token ids")
        for index, token in enumerate(value):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                _refuse(f"token_ids[{index}]", token, f"must be a token id from 0 to {self._vocab_size - 1}")
        return list(value)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with faults_as(lambda reason: PrefixError(f"the tokenizer fails at its text: {reason}; change the text")):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if ids and max(ids) >= self._vocab_size:
            raise PrefixError(
                f"its text has the token {max(ids)}, which is not in the model's vocabulary of {self._vocab_size}; "
                "change the text"
            )
        return ids


def _refuse(field: str, value: Any, what: str) -> NoReturn:
    raise PrefixError(f"{field} {'is missing and ' if value is None else _shown(value) + ' '}{what}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""The chat template of a model folder, the same in gateway and worker: Jinja that came with the model, rendered in a
sandbox to the very text that Transformers renders.

The environment is that of `transformers.utils.chat_template_utils`: blocks are trimmed, loop controls and the
`generation` tag are known, and templates have `raise_exception`, `strftime_now`, a plain `tojson`, and a `dict` and a
`namespace` that lead nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.shared.text.tokenizer import ModelError, read_json

# With `role`, `content` (a string, or a list of text parts) and perhaps `name`.
Message = Mapping[str, Any]

# The roles of a conversation in which a template is asked what it does with a message of one of them.
_PROBES = {"system": ("system", "user"), "user": ("user",), "assistant": ("user", "assistant", "user")}


class TemplateFailure(Exception):
    """A template that refuses a conversation, or that cannot render it: in its own words."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training. Here it only must not disturb."""

    tags = {"generation"}  # noqa: RUF012 - the name and the form are Jinja's

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """`dict` as templates call it. The type itself would lend them its methods, which change what the sandbox lets
    nobody change: `dict.update(messages[0], ...)`."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """Without names that Python itself looks up: whatever is `__html__` would be called past the sandbox."""

    def __init__(*arguments: Any, **named: Any) -> None:
        self, *others = arguments  # as in Jinja: `self` may also be one of the names
        attributes = dict(*others, **named)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the name {name!r} in a namespace is unsafe.")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class ChatTemplate:
    """One compiled template. Raises TemplateFailure, at construction for what is not a template at all."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailure(str(error)) from error
        self._special_tokens = dict(special_tokens)
        self._takes_strings = {role for role in _PROBES if self._shows(role, "first", "x")}
        # Two of them: there are templates that read the first part and leave out the others, in some of the roles.
        parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
        self._takes_parts = {role for role in _PROBES if self._shows(role, parts, [{"type": "text", "text": "x"}])}

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation."""
        return self._render([self._fitted(message) for message in messages], add_generation_prompt)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program of its own: it may raise whatever Python raises
            raise TemplateFailure(str(error) or type(error).__name__) from error

    def _fitted(self, message: Message) -> Message:
        """The message with its content in a form that the template can read: a string or a list of parts."""
        role, content = message["role"], message["content"]
        if isinstance(content, list) and role not in self._takes_parts:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and role in self._takes_parts and role not in self._takes_strings:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _shows(self, role: str, content: Any, others: Any) -> bool:
        """Whether the template renders such content of a role as its text, rather than losing some of it or showing its
        Python form. `others` is the content of the messages around it."""
        messages = [{"role": one, "content": content if one == role else others} for one in _PROBES[role]]
        try:
            rendered = self._render(messages, add_generation_prompt=False)
        except TemplateFailure:
            return False
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        return all(text in rendered and f"'{text}'" not in rendered and f'"{text}"' not in rendered for text in texts)


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The default chat template of a model folder, None if it has none. Raises ModelError for one that is broken.

    Places are looked at in the order in which Transformers lets them win. `tokenizer_config` is what
    tokenizer_config.json says, `special_tokens` what `read_special_tokens` found.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            source: Any = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}; fetch the model again.") from error
    else:
        path = folder / "tokenizer_config.json"
        source = tokenizer_config.get("chat_template")
        if source is None:
            path = folder / "chat_template.json"
            source = read_json(path).get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except TemplateFailure as error:
        raise ModelError(f"the chat template in {path} is not valid: {error}; correct or remove it.") from error

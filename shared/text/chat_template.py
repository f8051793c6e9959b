"""Chat templates: the Jinja template of a model folder, rendered in a sandbox to the same text as in Transformers.

The environment is that of `transformers.utils.chat_template_utils`: blocks are trimmed, loop controls and the
`generation` tag are known, and templates have `raise_exception`, `strftime_now` and a plain `tojson`. `dict` and
`namespace` are replaced by versions that do not lead out of the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.utils
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.shared.model.files import ModelError, check_file, read_json
from quire.shared.model.folder import is_gguf
from quire.shared.text.role_order import probe_role_order
from quire.shared.text.tool_turns import PROBED_TOOL, ToolTurns, called_tools, probe_tool_turns

# A message of a conversation: `role`, `content` (a string, a list of parts, or None in a message with tool calls)
# and perhaps `name`, `tool_calls`, `tool_call_id` and `reasoning_content`. The arguments of a tool call are an object.
Message = Mapping[str, Any]

# By role: the roles of the conversation with which a template is probed for the forms of content that it renders.
_PROBES = {"system": ("system", "user"), "user": ("user",), "assistant": ("user", "assistant", "user")}
# Names of chat templates, and the file of the second.
DEFAULT, TOOL_USE = "default", "tool_use"
TOOL_USE_FILE = "additional_chat_templates/tool_use.jinja"
# The variables that `ChatTemplate` sets, besides the special tokens.
_OWN = ("messages", "tools", "documents", "add_generation_prompt")


# Limits of products and powers in a template.
MAX_REPEATED, MAX_POWER = 1 << 20, 1000


class TemplateFailure(Exception):
    """A template refuses a conversation, or cannot render it. The text is the message of the template or of Jinja."""


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training, and renders its body."""

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
    """Replaces `dict` in templates. Methods of the type itself, such as `dict.update(messages[0], ...)`, would change
    objects that the sandbox protects."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that refuses names with a leading underscore: Jinja would call `__html__` outside of the sandbox."""

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


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no product or power of a template fills the memory."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not all(
            isinstance(operand, int | float) and abs(operand) <= MAX_POWER for operand in (left, right)
        ):
            raise jinja2.exceptions.SecurityError(f"a power of numbers above {MAX_POWER} is unsafe.")
        for repeated, times in ((left, right), (right, left)):
            if (
                isinstance(repeated, str | list | tuple)
                and isinstance(times, int)
                and len(repeated) * times > MAX_REPEATED
            ):
                raise jinja2.exceptions.SecurityError(f"a text or list of {len(repeated) * times} items is unsafe.")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class ChatTemplate:
    """A compiled template. Construction raises TemplateFailure for a source that is not a valid template.

    variables: names that the template takes from outside; `tools` is among them if it can describe tools to the model.
    tool_turns: the form in which it takes messages with tool calls. role_order: the order of roles that it holds.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise TemplateFailure(str(error)) from error
        self.source = source
        # The template for calls with tools. Some models have a template of their own, named `tool_use`.
        self.with_tools = self
        self._special_tokens = dict(special_tokens)
        self._takes_strings = {role for role in _PROBES if self._shows(role, "first", "x")}
        # Two parts: for some roles there are templates that render only the first part.
        parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
        self._takes_parts = {role for role in _PROBES if self._shows(role, parts, [{"type": "text", "text": "x"}])}
        self.tool_turns = ToolTurns()
        takes_tools = "tools" in self.variables
        if takes_tools:
            self.tool_turns = probe_tool_turns(self._try)
        self.role_order = probe_role_order(self._try_roles, called_tools(1) if takes_tools else [])

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt of a conversation. Raise TemplateFailure.

        tools: in the form of the OpenAI API. variables: further variables for the template, such as `enable_thinking`;
        none of them replaces a variable that this class sets.
        """
        written = self.tool_turns.written(self.role_order.written(messages))
        fitted = [self._fitted(message) for message in written]
        return self._render(fitted, add_generation_prompt, tools, variables)

    def chosen(self, messages: Sequence[Message], has_tools: bool) -> ChatTemplate:
        """Return the template for a call: that for tools also if messages have calls of tools or their results."""
        if has_tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
            return self.with_tools
        return self

    def takes_variable(self, name: str) -> bool:
        """Return whether a variable from outside reaches the template, or that for tools."""
        known = self.variables | self.with_tools.variables
        return name in known and name not in (*_OWN, *self._special_tokens)

    def _try(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the prompt of a conversation; None if the template refuses it."""
        try:
            return self._render([self._fitted(message) for message in messages], True, tools or None)
        except TemplateFailure:
            return None

    def _try_roles(self, messages: Sequence[Message], has_tools: bool) -> str | None:
        return self._try(self.tool_turns.written(messages), [PROBED_TOOL] if has_tools else [])

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        values = (messages, tools, None, add_generation_prompt)
        own = {**dict(zip(_OWN, values, strict=True)), **self._special_tokens}
        try:
            return self._template.render({**(variables or {}), **own})
        except Exception as error:  # a template is a program, which may raise any exception
            raise TemplateFailure(str(error) or type(error).__name__) from error

    def _fitted(self, message: Message) -> Message:
        """Return the message with its content in a form that the template renders: a string or a list of parts."""
        role, content = message["role"], message.get("content")
        if isinstance(content, list) and role not in self._takes_parts:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and role in self._takes_parts and role not in self._takes_strings:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _shows(self, role: str, content: Any, others: Any) -> bool:
        """Return whether the template renders such content of a role completely and as text, not as a Python literal.

        others: content of the surrounding messages.
        """
        messages = [{"role": probed, "content": content if probed == role else others} for probed in _PROBES[role]]
        try:
            rendered = self._render(messages, add_generation_prompt=False)
        except TemplateFailure:
            return False
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        return all(text in rendered and f"'{text}'" not in rendered and f'"{text}"' not in rendered for text in texts)


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Load the chat templates of a model folder: the default one, and `with_tools` if there is a template `tool_use`.

    Return None without a template. Raise ModelError for a broken one. The files are read in the order of precedence
    of Transformers. tokenizer_config: the content of tokenizer_config.json. special_tokens: the result of
    `read_special_tokens`.
    """
    sources = _read_sources(folder, tokenizer_config)
    names = [name for name in (DEFAULT, TOOL_USE) if name in sources] or list(sources)[:1]
    if not names:
        return None
    templates = []
    for name in names:
        path, source = sources[name]
        try:
            templates.append(ChatTemplate(source, special_tokens))
        except TemplateFailure as error:
            raise ModelError(f"the chat template in {path} is not valid: {error}; correct or remove it.") from error
    templates[0].with_tools = templates[-1]
    return templates[0]


def _read_sources(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """Return the path and the source of each chat template of a folder, by name."""
    path = folder / "tokenizer_config.json"
    stored = tokenizer_config.get("chat_template")
    if stored is None:
        path = folder / "chat_template.json"
        stored = read_json(path).get("chat_template")
    entries = stored if isinstance(stored, list) else [{"name": DEFAULT, "template": stored}]
    sources = {
        entry["name"]: (path, entry["template"])
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    for name, file in ((DEFAULT, "chat_template.jinja"), (TOOL_USE, TOOL_USE_FILE)):
        path = folder / file
        if is_gguf(folder) or not path.exists():
            continue
        check_file(path)
        try:
            sources[name] = (path, path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}; fetch the model again.") from error
    return sources

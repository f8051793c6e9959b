"""The form in which a chat template takes the turns of a tool call: what one template needs, another refuses.

A template is probed once with a conversation that has a tool call. Most templates take the form of the OpenAI API with
the arguments as an object. Others need an empty text instead of null, ids of nine characters, arguments as JSON text,
the reasoning under another key, one call per message, or results in the message with the calls.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.shared.text.tool_arguments import arguments_text

Messages = Sequence[Mapping[str, Any]]
# Renders messages with the given tools; returns None if the template refuses them.
Render = Callable[[Messages, Sequence[Mapping[str, Any]]], str | None]

# Keys of the reasoning of earlier messages, in the order in which they are tried; gpt-oss reads `thinking`, and
# Command R7B reads `tool_plan`.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "tool_plan")
# The ids that the templates of some Mistral models take.
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}", re.ASCII)

# The texts of the probe: no template has them in its own text.
_ARGUMENTS = ("firstargument", "secondargument")
_RESULTS = ("firstresult", "secondresult")
_REASONING = "probedreasoning"
_OTHER_NAME = "otherprobe"
PROBED_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "A value."}},
            "required": ["value"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class ToolTurns:
    """The form of messages with tool calls for one template.

    empty_content: the content of a message that has calls and no text. short_ids: the ids of calls have nine
    characters. text_arguments: arguments are JSON text, not an object. reasoning_key: the key of the reasoning of a
    message. is_parallel: a message may have several calls. numbered_ids: the template shows ids in place of names, as
    that of Kimi K2: an id has the name of the tool and the number of the call in the conversation. has_responses:
    results are `tool_responses` of the message with the calls, as for Gemma 4. shows_calls: the template shows calls
    and their results in some form.
    """

    empty_content: str | None = None
    short_ids: bool = False
    text_arguments: bool = False
    reasoning_key: str = REASONING_KEYS[0]
    is_parallel: bool = True
    numbered_ids: bool = False
    has_responses: bool = False
    shows_calls: bool = True

    def written(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages of a conversation in this form. Results of tools get the name of their tool."""
        names: dict[str, str] = {}
        ids: dict[str, str] = {}
        written: list[dict[str, Any]] = []
        count = 0
        for message in self._turns(messages):
            turn = dict(message)
            if calls := turn.get("tool_calls"):
                names |= {call["id"]: call["function"]["name"] for call in calls}
                ids |= {call["id"]: self._id(call["id"], names, number) for number, call in enumerate(calls, count)}
                count += len(calls)
                turn["tool_calls"] = [self._call(call, ids[call["id"]]) for call in calls]
                turn["content"] = turn["content"] or self.empty_content
            elif turn["role"] == "tool":
                call_id = turn["tool_call_id"]
                if name := names.get(call_id):
                    turn.setdefault("name", name)
                if self.has_responses and written and written[-1].get("tool_calls"):
                    response = {"name": turn.get("name", ""), "response": _text(turn["content"])}
                    written[-1].setdefault("tool_responses", []).append(response)
                    continue
                turn["tool_call_id"] = ids.get(call_id) or self._id(call_id, names, count)
            if "reasoning_content" in turn:
                turn[self.reasoning_key] = turn.pop("reasoning_content")
            written.append(turn)
        return written

    def _call(self, call: Mapping[str, Any], call_id: str) -> dict[str, Any]:
        function = call["function"]
        if self.text_arguments:
            function = {**function, "arguments": arguments_text(function["arguments"])}
        return {**call, "id": call_id, "function": function}

    def _id(self, call_id: str, names: Mapping[str, str], number: int) -> str:
        """Return an id in this form. number: of the call in the conversation."""
        if self.numbered_ids and call_id in names:
            return f"functions.{names[call_id]}:{number}"
        if not self.short_ids or _SHORT_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def _turns(self, messages: Messages) -> Iterator[Mapping[str, Any]]:
        """Yield the messages; without `is_parallel`, each call of a message as a turn with its own result."""
        at = 0
        while at < len(messages):
            message = messages[at]
            at += 1
            calls = message.get("tool_calls") or ()
            if self.is_parallel or len(calls) < 2:
                yield message
                continue
            end = at
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            results = list(messages[at:end])
            at = end
            for call in calls:
                yield {**message, "tool_calls": [call]}
                yield from (result for result in results if result["tool_call_id"] == call["id"])
                # Text and reasoning come before the first call.
                message = {"role": message["role"], "content": None}
            known = {call["id"] for call in calls}
            yield from (result for result in results if result["tool_call_id"] not in known)


def probe_tool_turns(render: Render) -> ToolTurns:
    """Return the form in which a template shows the model a tool call and its result.

    If no form does, this is the first form that the template takes; then the default form.
    """
    forms = [
        ToolTurns(empty_content=content, short_ids=short_ids, text_arguments=text_arguments)
        for content in (None, "")
        for short_ids in (False, True)
        for text_arguments in (False, True)
    ]
    conversation = called_tools(1)
    shown = [(form, text) for form in forms if (text := _render(render, form, conversation, 1)) is not None]
    if not shown:
        taken = (form for form in forms if render(form.written(conversation), [PROBED_TOOL]) is not None)
        return replace(next(taken, forms[0]), shows_calls=False)
    nulls = min(text.count("None") for _, text in shown)  # a template may have the word in its own text
    clean = (form for form, text in shown if _is_clean(text) and text.count("None") == nulls)
    form = next(clean, shown[0][0])
    with_responses = replace(form, has_responses=True)
    if _render(render, with_responses, conversation, 1) is not None:
        form = with_responses
    form = replace(form, numbered_ids=_shows_ids_for_names(render, form))
    reasoning = called_tools(1, _REASONING)
    for key in REASONING_KEYS:
        text = _render(render, replace(form, reasoning_key=key), reasoning, 1)
        if text is not None and _REASONING in text:
            form = replace(form, reasoning_key=key)
            break
    return replace(form, is_parallel=_render(render, form, called_tools(2), 2) is not None)


def called_tools(calls: int, reasoning: str = "") -> list[dict[str, Any]]:
    """Return the conversation of a probe: a question, tool calls, and their results."""
    ids = [f"call_{index:024}" for index in range(calls)]
    made = [
        {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": {"value": _ARGUMENTS[index]}}}
        for index, call_id in enumerate(ids)
    ]
    return [
        {"role": "user", "content": "question"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": made,
            **({"reasoning_content": reasoning} if reasoning else {}),
        },
        *({"role": "tool", "tool_call_id": call_id, "content": _RESULTS[index]} for index, call_id in enumerate(ids)),
    ]


def _render(render: Render, form: ToolTurns, conversation: Messages, calls: int) -> str | None:
    """Return the text of a conversation; None if the template refuses it, or leaves out a call or a result."""
    text = render(form.written(conversation), [PROBED_TOOL])
    if text is None or any(value not in text for value in (*_ARGUMENTS[:calls], *_RESULTS[:calls])):
        return None
    return text


def _shows_ids_for_names(render: Render, form: ToolTurns) -> bool:
    """Return whether a template shows the id of a call and not its name."""
    asked, turn, _ = called_tools(1)
    call = {**turn["tool_calls"][0], "function": {"name": _OTHER_NAME, "arguments": {}}}
    text = render(form.written([asked, {**turn, "tool_calls": [call]}]), [PROBED_TOOL]) or ""
    return call["id"] in text and _OTHER_NAME not in text


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def _is_clean(text: str) -> bool:
    """Return whether a text has arguments neither as a Python literal nor as JSON within a JSON string."""
    argument = _ARGUMENTS[0]
    return f"'{argument}'" not in text and f'\\"{argument}' not in text

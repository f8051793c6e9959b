"""Tools and reasoning in chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.api.tools import check_choice, read_tool_choice, read_tools, schema_size
from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.features.tools.formats import FORMATS
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.config.validators import InvalidValue
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Script, Steps
from tests.support.gateway.running import Event, RunningGateway, tokens, write_model
from tests.support.tokenizers import byte_level

# --- A chat with tools, from the body to the answer: what the model is told, the grammar, the parts of the ------------


CHAT = "/v1/chat/completions"
# Writes tools, reasoning, calls and results, as the templates of Qwen3 do.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{{ reasoning_effort }}{{ verbosity }}"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USER = {"role": "user", "content": "1 + 1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tools") / "test-model", chat_template=TEMPLATE)


@pytest.fixture
async def tools_gateway(start_gateway: Start, folder: Path) -> RunningGateway:
    return await start_gateway(model=str(folder), tool_call_format="hermes", reasoning_format="think")


def body(**parameters: Any) -> dict[str, Any]:
    return {"model": "test-model", "messages": [USER], "tools": [ADD], **parameters}


def answering(text: str, step: int = 1, reason: str = "stop") -> Script:
    """Returns a script that emits a text, `step` tokens at once, then the end token."""

    async def script(request: GenerationRequest) -> Steps:
        emitted = [*tokens(text), 2]
        for at in range(0, len(emitted), step):
            last = at + step >= len(emitted)
            delta = Delta(0, tuple(emitted[at : at + step]), reason if last else None)
            yield (delta,), Outcome(reason) if last else None

    return script


def prompt_of(request: GenerationRequest) -> str:
    text: str = byte_level().decode(list(request.prompt), skip_special_tokens=False)
    return text


def streamed(events: list[Event]) -> dict[str, Any]:
    """Adds up the deltas of a stream."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        if event.data == "[DONE]" or not event.data["choices"]:
            continue
        delta = event.data["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append(
                    {key: call[key] for key in ("id", "type")} | {"function": dict(call["function"])}
                )
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


async def test_an_answer_has_reasoning_content_and_calls(tools_gateway: RunningGateway) -> None:
    text = f"<think>\nI add.\n</think>\n\nSure.\n{CALL}\n{CALL}"
    async with tools_gateway.worker(answering(text)):
        reply = await tools_gateway.post(CHAT, body())
    assert reply.status == 200, reply.body
    [choice] = reply.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("I add.", "Sure.")
    first, second = message["tool_calls"]
    assert first["function"] == second["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert first["id"] != second["id"]


@pytest.mark.parametrize(("end", "reason"), [(CALL, "tool_calls"), (" <tool", "stop")])
async def test_a_stream_adds_up_to_the_whole_answer(tools_gateway: RunningGateway, end: str, reason: str) -> None:
    """Also if it ends with what may be the beginning of a call."""
    call = body(seed=1)
    async with tools_gateway.worker(answering(f"<think>\nhm</think>one{end}")):
        whole = await tools_gateway.post(CHAT, call, idempotency_key="a")
        async with tools_gateway.stream(CHAT, {**call, "stream": True}) as stream:
            events = await stream.rest()
    message = {"tool_calls": [], **whole.json["choices"][0]["message"]}
    sum_ = streamed(events)
    for call_ in (*message["tool_calls"], *sum_["tool_calls"]):
        assert call_.pop("id").startswith("call_")
    assert sum_ == {name: message[name] for name in ("content", "reasoning_content", "tool_calls")}
    assert message["content"] == ("one" if end == CALL else f"one{end}")
    assert events[-2].data["choices"][0]["finish_reason"] == reason


PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "tools": ({}, json.dumps({**ADD, "function": {**ADD["function"], "description": ""}})[:40]),  # type: ignore[dict-item]
    "reasoning effort": ({"reasoning_effort": "low"}, "assistant\nlow"),
    "verbosity": ({"verbosity": "high"}, "assistant\nhigh"),
    "a variable of the template": ({"chat_template_kwargs": {"enable_thinking": True}}, "assistant\n<think>\n"),
}


@pytest.mark.parametrize(("parameters", "expected"), PROMPTS.values(), ids=PROMPTS)
async def test_the_template_gets(tools_gateway: RunningGateway, parameters: dict[str, Any], expected: str) -> None:
    async with tools_gateway.worker(answering("x")) as worker:
        assert (await tools_gateway.post(CHAT, body(**parameters))).status == 200
    assert expected in prompt_of(worker.claimed[0])


async def test_with_none_the_model_is_not_told_about_tools(tools_gateway: RunningGateway) -> None:
    async with tools_gateway.worker(answering(CALL)) as worker:
        reply = await tools_gateway.post(CHAT, body(tool_choice="none"))
    [request] = worker.claimed
    assert '"add"' not in prompt_of(request)
    assert request.sampling.grammar == ""
    assert reply.json["choices"][0]["message"]["content"] == CALL


async def test_a_history_has_calls_as_text_if_the_template_shows_none(start_gateway: Start, tmp_path: Path) -> None:
    template = TEMPLATE.replace("m.tool_calls or []", "[]")
    folder = write_model(tmp_path / "test-model", chat_template=template)
    gateway = await start_gateway(model=str(folder), tool_call_format="granite")
    called = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    async with gateway.worker(answering("Two.")) as worker:
        reply = await gateway.post(CHAT, body(messages=messages))
    assert reply.status == 200, reply.body
    prompt = prompt_of(worker.claimed[0])
    assert prompt.count('"name": "add", "description"') == 1, "the template describes the tools"
    assert '<|im_start|>assistant\n<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|im_end|>' in prompt
    assert "<|im_start|>user\nResult of add:\n2<|im_end|>" in prompt


async def test_marks_around_content_are_dropped_without_tools(start_gateway: Start, folder: Path) -> None:
    gateway = await start_gateway(model=str(folder), tool_call_format="cohere")
    async with gateway.worker(answering("<|START_RESPONSE|>Two.<|END_RESPONSE|>")):
        reply = await gateway.post(CHAT, {"model": "test-model", "messages": [USER]})
    assert reply.json["choices"][0]["message"]["content"] == "Two."


async def test_a_prompt_that_ends_in_reasoning_begins_the_answer_there(tools_gateway: RunningGateway) -> None:
    async with tools_gateway.worker(answering("because</think>yes")):
        reply = await tools_gateway.post(
            CHAT, {"model": "test-model", "messages": [USER], "chat_template_kwargs": {"enable_thinking": True}}
        )
    message = reply.json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("because", "yes")


async def test_a_schema_of_the_answer_allows_calls(tools_gateway: RunningGateway) -> None:
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "maxProperties": 0}}}
    async with tools_gateway.worker(answering("{}")) as worker:
        reply = await tools_gateway.post(CHAT, body(response_format=answer))
    assert reply.json["choices"][0]["message"]["content"] == "{}"
    grammar = json.loads(worker.claimed[0].sampling.grammar)["lark"]
    assert "| content" in grammar
    assert "maxProperties" in grammar or '"additionalProperties":false' in grammar


def tool(strict: bool = False, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}


# A schema that no grammar can follow.
HARD: dict[str, Any] = {"properties": {"x": {"$ref": "https://example.com/schema"}}}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a strict schema that cannot be followed": (
        {"tools": [ADD, tool(strict=True, **HARD)]},
        "tools[1].function.parameters",
        "of the tool f, cannot be followed",
    ),
    "too many tools": ({"tools": [tool()] * 5}, "tools[1].function.name", "is the name of another tool"),
    "required without tools": ({"tools": [], "tool_choice": "required"}, "tool_choice", "the call has no tools"),
    "beams": ({"use_beam_search": True}, "tools", "not supported with use_beam_search"),
    "a pattern": ({"guided_regex": "x"}, "tools", "not supported with this guided_regex"),
    "no end": ({"ignore_eos": True}, "tools", "not supported with ignore_eos"),
    "a variable of the server": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "cannot"),
    "a hidden variable": ({"chat_template_kwargs": {"_x": 1}}, "chat_template_kwargs._x", "cannot be set"),
    "an unknown effort": ({"reasoning_effort": "much"}, "reasoning_effort", "must be"),
}


@pytest.mark.parametrize(("parameters", "param", "message"), REFUSED.values(), ids=REFUSED)
async def test_what_is_refused(
    tools_gateway: RunningGateway, parameters: dict[str, Any], param: str, message: str
) -> None:
    reply = await tools_gateway.post(CHAT, body(**parameters))
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert message in reply.error["message"]


async def test_the_limits_of_tools_are_settings(start_gateway: Start, folder: Path) -> None:
    gateway = await start_gateway(
        model=str(folder), tool_call_format="hermes", max_tools=1, max_schema_bytes=256, max_schema_depth=4
    )
    deep = {"properties": {"a": {"properties": {"b": {}}}}}
    for parameters, param, message in (
        ({"tools": [ADD, tool()]}, "tools", "at most 1 (--max-tools)"),
        ({"tools": [tool(title="x" * 256)]}, "tools[0].function.parameters", "--max-schema-bytes"),
        ({"tools": [tool(**deep)]}, "tools[0].function.parameters", "--max-schema-depth"),
    ):
        reply = await gateway.post(CHAT, body(**parameters))
        assert (reply.status, reply.error["param"]) == (400, param)
        assert message in reply.error["message"]


async def test_a_schema_that_cannot_be_followed_allows_any_object(tools_gateway: RunningGateway) -> None:
    async with tools_gateway.worker(answering("x")) as worker:
        reply = await tools_gateway.post(CHAT, body(tools=[tool(**HARD), ADD], tool_choice="required"))
    assert reply.status == 200, reply.body
    grammar = json.loads(worker.claimed[0].sampling.grammar)["lark"]
    assert "example.com" not in grammar
    assert '\\"a\\"' in grammar or '"a"' in grammar


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (f"Well.{CALL}", "Well.", '{"a": 1}'),
        ("Well.", "Well.", None),
        ('<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>', None, None),
        ('<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>', None, None),
    ],
)
async def test_a_gateway_may_leave_the_form_of_calls_to_the_model(
    start_gateway: Start, folder: Path, text: str, content: str | None, arguments: str | None
) -> None:
    gateway = await start_gateway(model=str(folder), tool_call_format="hermes", enforce_tools=False)
    async with gateway.worker(answering(text)) as worker:
        reply = await gateway.post(CHAT, body())
    [choice] = reply.json["choices"]
    assert worker.claimed[0].sampling.grammar == ""
    assert "tools[0].function.parameters" in reply.headers["x-quire-no-effect"]
    assert choice["message"]["content"] == (text if content is None else content), "what is no call is content"
    assert choice["finish_reason"] == ("tool_calls" if arguments else "stop")
    calls = choice["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == ([arguments] if arguments else [])


@pytest.mark.parametrize(
    "asked",
    [
        {"tool_choice": "required"},
        {"tools": [tool(strict=True)]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
    ],
)
async def test_calls_that_are_asked_for_are_held_to_their_form_in_any_case(
    start_gateway: Start, folder: Path, asked: dict[str, Any]
) -> None:
    gateway = await start_gateway(model=str(folder), tool_call_format="hermes", enforce_tools=False)
    async with gateway.worker(answering(CALL)) as worker:
        await gateway.post(CHAT, body(**asked))
    assert worker.claimed[0].sampling.grammar


# A template that teaches the model a form of tool calls that no format has.
OWN_FORM = (
    "{% if tools %}Write CALL name: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
)
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
DROPS_SYSTEM = PLAIN.replace("in messages", "in messages if m.role != 'system'")
BRIEF = {"role": "system", "content": "Be brief."}
LOOP = [
    BRIEF,
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]


@pytest.mark.parametrize(
    ("template", "form", "system"),
    [
        (OWN_FORM, "json", "system\nBe brief.\n\nYou can call functions."),
        (TEMPLATE, "json", "system\nBe brief.\n\nYou can call functions."),
        (PLAIN, "json", "system\nBe brief.\n\nYou can call functions."),
        (PLAIN, "hermes", "system\nBe brief.\n\nYou can call functions."),
        (REFUSES_SYSTEM, "json", "user\nBe brief.\n\nYou can call functions."),
        (DROPS_SYSTEM, "json", "user\nBe brief.\n\nYou can call functions."),
        (DROPS_SYSTEM, "mistral", "user\nBe brief.\n\nYou can call functions."),
    ],
)
async def test_the_prompt_teaches_the_form_of_the_calls_if_the_template_does_not(
    start_gateway: Start, tmp_path: Path, template: str, form: str, system: str
) -> None:
    folder = write_model(tmp_path / "test-model", chat_template=template)
    automatic = template is not TEMPLATE and form == "json"
    settings: dict[str, Any] = {} if automatic else {"tool_call_format": form}
    gateway = await start_gateway(model=str(folder), **settings)
    call = FORMATS[form].written("add", {"a": 1})
    async with gateway.worker(answering(call)) as worker:
        for messages in ([BRIEF, USER], LOOP):
            reply = await gateway.post(CHAT, body(messages=messages))
            assert reply.status == 200, reply.json
            assert reply.json["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    first, second = map(prompt_of, worker.claimed)
    assert system in first
    assert FORMATS[form].prompt([Tool("add", parameters=ADD["function"]["parameters"])]) in first  # type: ignore[index]
    assert "CALL name" not in first
    assert f"{call}<|im_end|>\n<|im_start|>user\nResult of add:\n2<|im_end|>" in second


@pytest.mark.parametrize(
    ("template", "parameters", "names"),
    [
        (TEMPLATE, {"reasoning_effort": "low", "verbosity": "low"}, ""),
        (TEMPLATE, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, ""),
        (PLAIN, {"reasoning_effort": "low", "verbosity": "high", "store": True}, "store, reasoning_effort, verbosity"),
        (PLAIN, {"reasoning_effort": "none"}, "reasoning_effort"),
        (PLAIN + "{{ thinking }}", {"reasoning_effort": "none"}, ""),
        (TEMPLATE, {"chat_template_kwargs": {"enable_thinking": True, "b": 1}}, "chat_template_kwargs.b"),
    ],
)
async def test_variables_that_the_template_does_not_know_are_named(
    start_gateway: Start, tmp_path: Path, template: str, parameters: dict[str, Any], names: str
) -> None:
    gateway = await start_gateway(model=str(write_model(tmp_path / "test-model", chat_template=template)))
    async with gateway.worker(answering("x")):
        reply = await gateway.post(CHAT, {"model": "test-model", "messages": [USER], **parameters})
    assert reply.status == 200, reply.json
    assert reply.headers.get("x-quire-no-effect", "") == names


async def test_a_tool_whose_schema_is_loosened_is_named(tools_gateway: RunningGateway) -> None:
    async with tools_gateway.worker(answering("x")):
        reply = await tools_gateway.post(CHAT, body(tools=[ADD, tool(**HARD)]))
        plain = await tools_gateway.post(CHAT, body())
    assert reply.headers["x-quire-no-effect"] == "tools[1].function.parameters"
    assert "x-quire-no-effect" not in plain.headers


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"properties": {"x": {"type": "string", "pattern": "(?<=a)b"}}}, ".properties.x", "look-around"),
        ({"properties": {"a": {"type": "array", "items": {"type": "strange"}}}}, ".properties.a.items", "Invalid type"),
        ({"properties": {"a": {"type": "integer"}}, "x-guidance": {}}, "", "x-guidance"),
    ],
)
async def test_the_place_in_a_schema_that_cannot_be_followed_is_named(
    tools_gateway: RunningGateway, schema: dict[str, Any], place: str, reason: str
) -> None:
    reply = await tools_gateway.post(CHAT, body(tools=[ADD, tool(strict=True, **schema)]))
    message = reply.error["message"]
    assert (reply.status, reply.error["param"]) == (400, "tools[1].function.parameters")
    assert f"tools[1].function.parameters{place}, of the tool f, cannot be followed: " in message
    assert reason in message
    assert "tool_call" not in message, "the grammar of tool calls is not the client's"
    assert "%json" not in message


# --- `tools` and `tool_choice` that are refused, by the name of the tool and the key ----------------------------------


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **fields}}


def test_a_tool_has_defaults_for_all_but_its_name() -> None:
    [tool] = read_tools("tools", [function()])
    assert tool == Tool("add", "", {"type": "object"}, strict=False)
    [tool] = read_tools("tools", [function(description="d", parameters={"properties": {}}, strict=True)])
    assert tool == Tool("add", "d", {"properties": {}, "type": "object"}, strict=True)


TOOLS: dict[str, tuple[Any, str]] = {
    "no array": ({}, "tools"),
    "a string": (["add"], "tools[0]"),
    "another type": ([{"type": "web_search"}], "tools[0].type"),
    "no type": ([{"function": {"name": "add"}}], "tools[0].type"),
    "no function": ([{"type": "function"}], "tools[0].function"),
    "unknown key": ([{**function(), "surprise": 1}], "tools[0].surprise"),
    "unknown key of the function": ([function(surprise=1)], "tools[0].function.surprise"),
    "no name": ([function(), {"type": "function", "function": {}}], "tools[1].function.name"),
    "a name with spaces": ([function(name="a b")], "tools[0].function.name"),
    "a long name": ([function(name="a" * 65)], "tools[0].function.name"),
    "the same name": ([function(), function()], "tools[1].function.name"),
    "description of another type": ([function(description=1)], "tools[0].function.description"),
    "strict of another type": ([function(strict="yes")], "tools[0].function.strict"),
    "parameters of another type": ([function(parameters=[])], "tools[0].function.parameters"),
    "parameters that are no object": ([function(parameters={"type": "string"})], "tools[0].function.parameters.type"),
}


@pytest.mark.parametrize(("value", "name"), TOOLS.values(), ids=TOOLS)
def test_tools_that_are_refused(value: Any, name: str) -> None:
    with pytest.raises((InvalidRequest, InvalidValue)) as caught:
        read_tools("tools", value)
    error = caught.value
    assert (error.param if isinstance(error, InvalidRequest) else error.name) == name


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        ("auto", ToolChoice(ToolMode.AUTO)),
        ("required", ToolChoice(ToolMode.REQUIRED)),
        ("none", ToolChoice(ToolMode.NONE)),
        (function(), ToolChoice(ToolMode.NAMED, "add")),
    ],
)
def test_a_choice(value: Any, choice: ToolChoice) -> None:
    assert read_tool_choice("tool_choice", value) == choice


CHOICES: dict[str, tuple[Any, str]] = {
    "another word": ("any", "tool_choice"),
    "the name of a mode": ("named", "tool_choice"),
    "a number": (1, "tool_choice"),
    "another type": ({"type": "custom"}, "tool_choice"),
    "no function": ({"type": "function"}, "tool_choice.function"),
    "no name": ({"type": "function", "function": {}}, "tool_choice.function.name"),
    "unknown key": ({**function(), "mode": "auto"}, "tool_choice.mode"),
}


@pytest.mark.parametrize(("value", "name"), CHOICES.values(), ids=CHOICES)
def test_choices_that_are_refused(value: Any, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_tool_choice("tool_choice", value)
    assert caught.value.param == name


def test_a_choice_must_fit_the_tools() -> None:
    tools = (Tool("add"),)
    for choice in (ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.NAMED, "add"), ToolChoice(ToolMode.NONE)):
        check_choice(tools, choice)
    check_choice((), ToolChoice())
    with pytest.raises(InvalidRequest, match="the call has no tools"):
        check_choice((), ToolChoice(ToolMode.REQUIRED))
    with pytest.raises(InvalidRequest, match="'sub', which is not among the tools"):
        check_choice(tools, ToolChoice(ToolMode.NAMED, "sub"))


def test_the_size_of_a_schema_is_its_json_and_its_nesting() -> None:
    assert schema_size({}) == (2, 1)
    assert schema_size({"a": [{"b": {}}]}) == (len('{"a":[{"b":{}}]}'), 4)
    endless: dict[str, Any] = {}
    for _ in range(100_000):
        endless = {"a": endless}
    assert schema_size(endless)[1] > 1000

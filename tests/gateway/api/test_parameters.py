"""Parameters: the wrong type, out of range, unknown or not honoured, is a 400 that names the parameter."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from quire.gateway.api import parameters
from quire.gateway.api.call import Call
from quire.gateway.api.chat_messages import MESSAGES_SCHEMA, read_messages
from quire.gateway.api.completions import read_prompts
from quire.gateway.api.parameters import read
from quire.gateway.api.prompts import PROMPTS_SCHEMA
from quire.gateway.errors.api_errors import ApiError, InvalidRequest, body
from quire.gateway.features.batches.batch_parameters import BATCHES, MAX_WINDOW_S, window_s
from quire.gateway.features.openapi.parameter_schemas import schema_of
from quire.gateway.features.tokenization.token_requests import read_detokenize, read_tokenize
from quire.shared.protocol.messages import GenerationRequest
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import CHAT, COMPLETIONS, MODEL, USER, RunningGateway, chat_body, check

# --- Values of parameters: the wrong type, out of range, unknown or not honoured, is a 400 that names the -------------


UNSUPPORTED: dict[str, Any] = {
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "functions": [{}],
    "function_call": "auto",
    "audio": {},
    "modalities": ["text", "audio"],
    "reasoning_effort": "high",
    "web_search_options": {},
    "suffix": "x",
    "verbosity": "low",
}


async def test_what_is_not_honoured_is_refused_by_name(server: RunningGateway) -> None:
    for name, path in [
        (name, path)
        for name in UNSUPPORTED
        for path, table in ((CHAT, parameters.CHAT), (COMPLETIONS, parameters.COMPLETIONS))
        if name not in table
    ]:
        base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
        await check(server, path, {**base, name: UNSUPPORTED[name]}, 400, name, f"{name} is not supported")


async def test_a_token_that_the_model_does_not_have(server: RunningGateway) -> None:
    for path, base in ((CHAT, chat_body()), (COMPLETIONS, {"model": MODEL, "prompt": "x"})):
        for name, value in (
            ("logit_bias", {"2147483647": 1}),
            ("logit_bias", {"9999999999": 1}),
            ("stop_token_ids", [2147483647]),
            ("stop_token_ids", [10**30]),
        ):
            await check(server, path, {**base, name: value}, 400, name, "the last one of the model")
        await check(server, path, {**base, "logit_bias": {"5": None}}, 400, "logit_bias.5")


async def test_a_beam_search_knows_no_stop_tokens(server: RunningGateway) -> None:
    asked = chat_body(use_beam_search=True, stop_token_ids=[5])
    await check(server, CHAT, asked, 400, "stop_token_ids", "not supported with use_beam_search")


async def test_what_no_api_knows_is_refused_too(server: RunningGateway) -> None:
    await check(server, CHAT, chat_body(temprature=1), 400, "temprature", "not a parameter")
    await check(server, CHAT, chat_body(surprise=None), 400, "surprise", "not a parameter")
    await check(server, CHAT, chat_body(prompt="x"), 400, "prompt", "not a parameter")
    await check(server, COMPLETIONS, {"model": MODEL, "prompt": "x", "messages": []}, 400, "messages")


async def test_values_that_ask_for_nothing_pass(gateway: RunningGateway) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "logprobs": None,
        "spaces_between_special_tokens": True,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "parallel_tool_calls": None,
        "store": False,
        "metadata": {},
    }
    async with gateway.worker(emit([65])):
        assert (await gateway.chat(**nothing)).status == 200
        assert (await gateway.complete(**nothing)).status == 200


async def test_a_salt_of_the_wrong_length_is_not_shown(server: RunningGateway) -> None:
    reply = await server.chat(cache_salt="secret" * 50)
    assert reply.error["message"] == "cache_salt must be a string of 1 to 256 characters, not of 300."


async def test_what_is_required(server: RunningGateway) -> None:
    await check(server, CHAT, {"messages": [USER]}, 400, "model", "required")
    await check(server, CHAT, {"model": MODEL}, 400, "messages", "required")
    await check(server, COMPLETIONS, {"model": MODEL, "prompt": None}, 400, "prompt", "required")


# --- Options of a call: parameters that contradict each other are refused; any parameters are accepted or -------------


async def test_parameters_that_contradict_each_other(server: RunningGateway) -> None:
    await check(server, CHAT, chat_body(min_tokens=9, max_tokens=8), 400, "min_tokens", "more than the 8")
    await check(server, CHAT, chat_body(max_tokens=8, max_completion_tokens=9), 400, "max_completion_tokens")
    await check(server, CHAT, chat_body(stream_options={"include_usage": True}), 400, "stream_options")
    options = {"stream": True, "stream_options": {"surprise": 1}}
    await check(server, CHAT, chat_body(**options), 400, "stream_options.surprise")
    options = {"stream": True, "stream_options": {"include_usage": 1}}
    await check(server, CHAT, chat_body(**options), 400, "stream_options.include_usage")


BEAMS = {"use_beam_search": True}
RANKING: dict[str, tuple[dict[str, Any], str, str]] = {
    "fewer than n": ({"n": 3, "best_of": 2}, "best_of", "best_of is 2, which is less than n = 3"),
    "a stream of the best": (
        {"best_of": 3, "stream": True},
        "best_of",
        "best_of 3 with n 1 cannot be streamed: which choices are the best is known at the end only",
    ),
    "a stream of beams": (
        {**BEAMS, "stream": True},
        "use_beam_search",
        "use_beam_search is not supported with stream: which beams are the best",
    ),
    "the best of beams": (
        {**BEAMS, "best_of": 1},
        "best_of",
        "best_of is not supported with use_beam_search: beam_width says",
    ),
    "fewer beams than n": (
        {**BEAMS, "n": 3, "beam_width": 2},
        "beam_width",
        "beam_width is 2, which is less than n = 3",
    ),
    "a width of no beams": ({"beam_width": 4}, "beam_width", "beam_width is allowed only with use_beam_search: true"),
    "a penalty of no beams": (
        {"length_penalty": 1},
        "length_penalty",
        "length_penalty is allowed only with use_beam_search: true",
    ),
    "an end of no beams": (
        {"use_beam_search": False, "early_stopping": False},
        "early_stopping",
        "early_stopping is allowed only with use_beam_search: true",
    ),
    "temperature": (
        {**BEAMS, "temperature": 1},
        "temperature",
        "temperature is 1.0, but use_beam_search draws no tokens",
    ),
    "top_p": ({**BEAMS, "top_p": 0.9}, "top_p", "let it be 1"),
    "top_k": ({**BEAMS, "top_k": 5}, "top_k", "top_k is 5"),
    "min_p": ({**BEAMS, "min_p": 0.1}, "min_p", "let it be 0"),
    "stop": ({**BEAMS, "stop": ["x", "y"]}, "stop", "stop is not supported with use_beam_search"),
}


async def test_rankings_that_contradict_themselves(server: RunningGateway) -> None:
    for path in [CHAT, COMPLETIONS]:
        for asked, param, says in RANKING.values():
            base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
            await check(server, path, {**base, **asked}, 400, param, says)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([*parameters.CHAT, *parameters.COMPLETIONS, *parameters.UNSUPPORTED]) | st.text(max_size=5)


def refused(act: Callable[[], object]) -> dict[str, Any] | None:
    """The error as a client would get it; any other exception is a fault of the gateway."""
    try:
        act()
    except ApiError as error:
        found: dict[str, Any] = json.loads(body(error))["error"]
        return found
    return None


@given(st.dictionaries(names, values, max_size=5))
def test_any_parameters_are_accepted_or_refused_by_name(given_values: dict[str, Any]) -> None:
    for table in (parameters.CHAT, parameters.COMPLETIONS):
        refusal = refused(lambda table=table: Call.of(read(given_values, table), {}))
        assert refusal is None or refusal["param"] is not None


@given(values)
def test_any_messages_and_prompts_are_accepted_or_refused_by_name(value: Any) -> None:
    for reading in (read_messages, lambda prompt: read_prompts(prompt, 8, 100)):
        refusal = refused(lambda reading=reading: reading(value))
        assert refusal is None or refusal["param"] is not None


@given(
    st.fixed_dictionaries(
        {"model": st.just("m"), "prompt": st.just("x")},
        optional={
            "n": st.integers(1, 5),
            "best_of": st.integers(1, 6),
            "use_beam_search": st.booleans(),
            "beam_width": st.integers(2, 6),
            "length_penalty": st.floats(-10, 10),
            "early_stopping": st.sampled_from([False, True, "never"]),
            "stream": st.booleans(),
            "temperature": st.sampled_from([0, 0.0, 0.5, 1]),
            "top_p": st.sampled_from([0.5, 1]),
            "stop": st.sampled_from([[], "x"]),
        },
    )
)
def test_what_is_accepted_can_be_ranked_and_streamed_as_asked(given_values: dict[str, Any]) -> None:
    def read() -> Call:
        return Call.of(parameters.read(given_values, parameters.COMPLETIONS), {})

    if (refusal := refused(read)) is not None:
        assert refusal["param"] in given_values
        return
    accepted = read()
    sampling = accepted.common
    assert sampling.num_sequences >= sampling.n == given_values.get("n", 1)
    assert sampling.num_sequences == max(accepted.counts.values())
    assert sampling.is_streamed or not accepted.stream
    assert bool(sampling.beam_width) == given_values.get("use_beam_search", False)
    assert not sampling.beam_width or (sampling.temperature, sampling.stop, sampling.best_of) == (0.0, (), 0)
    request = GenerationRequest("r", "m", (1,), sampling)
    assert GenerationRequest.decode(request.encode()) == request


# --- The parameters of a new batch ------------------------------------------------------------------------------------


GIVEN = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}


@pytest.mark.parametrize(
    ("window", "seconds"), [("1m", 60), ("90m", 5400), ("24h", 86_400), ("7d", 604_800), ("14d", MAX_WINDOW_S)]
)
def test_windows(window: str, seconds: int) -> None:
    assert read(GIVEN | {"completion_window": window}, BATCHES, {})["completion_window"] == window
    assert window_s(window) == seconds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("completion_window", value) for value in ("0h", "24", "h", "-1h", "1.5h", "15d", "24H", "24h ", 24)),
        ("completion_window", "999999h"),
        ("endpoint", "/v1/messages"),
        ("endpoint", ["/v1/embeddings"]),
        ("input_file_id", ""),
        ("input_file_id", 5),
        ("input_file_id", "x" * 129),
        ("metadata", {"k" * 65: "x"}),
        ("output_expires_after", 3600),
        ("output_expires_after", {"anchor": "created_at"}),
        ("output_expires_after", {"anchor": "now", "seconds": 3600}),
        ("output_expires_after.seconds", {"anchor": "created_at", "seconds": 3599}),
        ("output_expires_after.seconds", {"anchor": "created_at", "seconds": True}),
    ],
    ids=str,
)
def test_other_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(GIVEN | {name.partition(".")[0]: value}, BATCHES, {})
    assert caught.value.param == name


@pytest.mark.parametrize("name", GIVEN)
def test_the_first_three_are_required(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is required") as caught:
        read({key: value for key, value in GIVEN.items() if key != name}, BATCHES, {})
    assert caught.value.param == name


# --- The bodies of `/tokenize` and `/detokenize`: defaults and refusals -----------------------------------------------


TOKEN_REQUESTS_MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "either prompt or messages"),
        ({"prompt": "x", "messages": TOKEN_REQUESTS_MESSAGES}, "prompt", "either prompt or messages"),
        ({"prompt": 5}, "prompt", "a string"),
        ({"prompt": ["x"]}, "prompt", "a string"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "only with messages"),
        ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "true or false"),
        ({"messages": []}, "messages", "1 to 10000"),
        ({"messages": [{"role": "x"}]}, "messages[0].role", "system"),
        ({"prompt": "x", "chat_template": "x"}, "chat_template", "not a parameter"),
        ({"messages": TOKEN_REQUESTS_MESSAGES, "tools": [{}]}, "tools[0].type", "must be function"),
        ({"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "only with messages"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "only with messages"),
        (
            {"messages": TOKEN_REQUESTS_MESSAGES, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "cannot be set",
        ),
        (
            {"messages": TOKEN_REQUESTS_MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "cannot both be true",
        ),
    ],
)
def test_a_wrong_body_is_refused(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        read_tokenize(body)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize("tokens", [None, "x", [True], [-1], [1.0], [["x"]], [0, 100], [10**30]])
def test_tokens_are_those_of_the_vocabulary(tokens: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_detokenize({"tokens": tokens}, 100)
    assert caught.value.param is not None
    assert caught.value.param.startswith("tokens")


# --- Schemas of parameters with readers of their own, against the readers of a gateway --------------------------------


USER_MESSAGE = {"role": "user", "content": "x"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ASSISTANT = {"role": "assistant", "content": None}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}


def schema_call(**changes: Any) -> list[Any]:
    """A conversation with a tool call in which some keys have other values."""
    return [{**ASSISTANT, "tool_calls": [{**CALL, **changes}]}]


GOOD_MESSAGES: list[Any] = [
    [USER_MESSAGE],
    [{"role": "developer", "content": [{"type": "text", "text": ""}]}, {**USER_MESSAGE, "name": "n"}],
    [{**USER_MESSAGE, "name": None, "tool_calls": None}],
    [
        {
            **USER_MESSAGE,
            "content": [{"type": "text", "text": "x", "other": None}],
            "refusal": None,
            "annotations": [],
        }
    ],
    [{**ASSISTANT, "tool_calls": [CALL]}, RESULT],
    [{"role": "assistant", "tool_calls": [CALL, {**CALL, "index": 1}]}, {**RESULT, "name": "f"}],
    [{**ASSISTANT, "content": "x", "tool_calls": [], "reasoning_content": "r"}],
    [{**ASSISTANT, "reasoning_content": "r"}],
    [{**ASSISTANT, "reasoning": "r"}],
    schema_call(function={"name": "f", "arguments": ""}),
    schema_call(function={"name": "f", "arguments": " "}),
    schema_call(function={"name": "f", "arguments": '{"a": "cut'}),
    [{"role": "assistant", "tool_calls": [{"id": "1", "function": CALL["function"]}] * 128}],
]
FIRST, PART, FIRST_CALL = "messages[0]", "messages[0].content[0]", "messages[0].tool_calls[0]"
# What is refused, and the name of the value at fault.
BAD_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ("x", "messages"),
    ({"role": "user"}, "messages"),
    ([], "messages"),
    (["x"], FIRST),
    ([USER_MESSAGE, "x"], "messages[1]"),
    ([{"content": "x"}], f"{FIRST}.role"),
    ([{"role": "robot", "content": "x"}], f"{FIRST}.role"),
    ([{"role": ["user"], "content": "x"}], f"{FIRST}.role"),
    ([{"role": "user"}], f"{FIRST}.content"),
    ([{"role": "user", "content": 5}], f"{FIRST}.content"),
    ([{"role": "user", "content": []}], f"{FIRST}.content"),
    ([{"role": "user", "content": ["x"]}], PART),
    ([{"role": "user", "content": [{"type": "audio", "text": "x"}]}], f"{PART}.type"),
    ([{"role": "user", "content": [{"type": "image_url", "text": "x"}]}], f"{PART}.text"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], f"{PART}.image_url"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 1}}]}], f"{PART}.image_url.url"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "detail": "original"}}]}],
        f"{PART}.image_url.detail",
    ),
    ([{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], f"{PART}.type"),
    ([{"role": "user", "content": [{"type": "text"}]}], f"{PART}.text"),
    ([{**USER_MESSAGE, "content": [{"type": "text", "text": "x", "other": 1}]}], f"{PART}.other"),
    ([{**USER_MESSAGE, "name": ""}], f"{FIRST}.name"),
    ([{**USER_MESSAGE, "name": "x" * 257}], f"{FIRST}.name"),
    ([{**USER_MESSAGE, "name": 1}], f"{FIRST}.name"),
    ([{**USER_MESSAGE, "refusal": "no"}], f"{FIRST}.refusal"),
    ([{**USER_MESSAGE, "reasoning_content": "r"}], f"{FIRST}.reasoning_content"),
    ([{**USER_MESSAGE, "tool_calls": [CALL]}], f"{FIRST}.tool_calls"),
    ([{**USER_MESSAGE, "tool_call_id": "call_1"}], f"{FIRST}.tool_call_id"),
    ([{**USER_MESSAGE, "other": []}], f"{FIRST}.other"),
    ([{**USER_MESSAGE, "provider_specific_fields": {}}], f"{FIRST}.provider_specific_fields"),
    ([ASSISTANT], f"{FIRST}.content"),
    ([USER_MESSAGE, ASSISTANT], "messages[1].content"),
    ([{**ASSISTANT, "tool_calls": []}], f"{FIRST}.content"),
    ([{**ASSISTANT, "reasoning_content": ""}], f"{FIRST}.content"),
    ([{**ASSISTANT, "content": "x", "reasoning_content": 5}], f"{FIRST}.reasoning_content"),
    ([{**ASSISTANT, "content": "x", "provider_specific_fields": ["x"]}], f"{FIRST}.provider_specific_fields"),
    (
        [{**ASSISTANT, "content": "x", "provider_specific_fields": {"refusal": None, "content": "y"}}],
        f"{FIRST}.provider_specific_fields",
    ),
    ([{**ASSISTANT, "tool_calls": CALL}], f"{FIRST}.tool_calls"),
    ([{"role": "assistant", "tool_calls": [CALL] * 129}], f"{FIRST}.tool_calls"),
    ([{**ASSISTANT, "tool_calls": ["f"]}], FIRST_CALL),
    (schema_call(id=""), f"{FIRST_CALL}.id"),
    (schema_call(id=None), f"{FIRST_CALL}.id"),
    (schema_call(type=None), f"{FIRST_CALL}.type"),
    (schema_call(type="custom"), f"{FIRST_CALL}.type"),
    (schema_call(other=None), f"{FIRST_CALL}.other"),
    (schema_call(function=None), f"{FIRST_CALL}.function"),
    (schema_call(function={"name": "f"}), f"{FIRST_CALL}.function.arguments"),
    (schema_call(function={"arguments": "{}"}), f"{FIRST_CALL}.function.name"),
    (schema_call(function={"name": "a b", "arguments": "{}"}), f"{FIRST_CALL}.function.name"),
    (schema_call(function={"name": "f", "arguments": {}}), f"{FIRST_CALL}.function.arguments"),
    (schema_call(function={"name": "f", "arguments": "{}", "other": None}), f"{FIRST_CALL}.function.other"),
    ([{**RESULT, "tool_call_id": None}], f"{FIRST}.tool_call_id"),
    ([{**RESULT, "content": None}], f"{FIRST}.content"),
    ([{"role": "tool", "content": "x"}], f"{FIRST}.tool_call_id"),
]
GOOD_PROMPTS: list[Any] = ["x", [1, 2], ["x", "y"], [[1], "x"]]
BAD_PROMPTS: list[Any] = [None, "", 5, [], [""], [[]], [-1], [[1.5]], [{}], [None]]


@pytest.mark.parametrize("value", GOOD_MESSAGES)
def test_messages_that_are_accepted(value: Any) -> None:
    assert Draft202012Validator(schema_of(MESSAGES_SCHEMA)).is_valid(value)
    read_messages(value)


@pytest.mark.parametrize(("value", "param"), BAD_MESSAGES)
def test_messages_that_are_refused_by_name(value: Any, param: str) -> None:
    assert not Draft202012Validator(schema_of(MESSAGES_SCHEMA)).is_valid(value)
    with pytest.raises(InvalidRequest) as caught:
        read_messages(value)
    assert caught.value.param == param


@pytest.mark.parametrize("value", GOOD_PROMPTS + BAD_PROMPTS)
def test_prompts(value: Any) -> None:
    good = value in GOOD_PROMPTS
    assert Draft202012Validator(schema_of(PROMPTS_SCHEMA)).is_valid(value) == good
    if good:
        read_prompts(value, 8, 100)
    else:
        with pytest.raises(InvalidRequest):
            read_prompts(value, 8, 100)

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
from quire.gateway.api.chat_messages import read_messages
from quire.gateway.api.completions import read_prompts
from quire.gateway.api.parameters import read
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.request_schemas import MESSAGES, PROMPT
from quire.gateway.errors.api_errors import ApiError, InvalidRequest, body
from quire.gateway.features.batches.batch_parameters import BATCHES, MAX_WINDOW_S, expires_after, window_s
from quire.gateway.features.tokenization.token_requests import read_detokenize, read_tokenize
from quire.shared.protocol.messages import GenerationRequest
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.refusals import CHAT, COMPLETIONS, USER, check
from tests.support.gateway.running import MODEL, RunningGateway, chat_body

# --- Values of parameters: the wrong type, out of range, unknown or not honoured, is a 400 that names the -------------


WRONG: dict[str, list[Any]] = {
    "temperature": ["hot", -0.1, 2.1, 1e308, True, [], {}, 10**30],
    "top_p": ["x", -1, 1.1],
    "top_k": [1.5, -2, 2**31, "x"],
    "min_p": [-0.1, 1.1],
    "seed": [1.5, "x", 2**64, -(2**63) - 1, True],
    "n": [0, -1, 129, 1.0, "1", True],
    "max_tokens": [0, -1, 1.5, "x", 10**18, True],
    "max_completion_tokens": [0, "x"],
    "min_tokens": [-1, 1.5],
    "ignore_eos": [1, "true"],
    "presence_penalty": [-2.1, 2.1, "x"],
    "frequency_penalty": [-2.1, 2.1, None.__class__.__name__],
    "repetition_penalty": [0, -1, 101],
    "stream": ["true", 1],
    "stop": [1, [1], [""], "", ["x"] * 17, ["x" * 1025], {}, [["x"]]],
    "model": [1, [], {}],
    "bad_words": ["x", [""], [" "], ["x"] * 65, ["x" * 257], [5], [None], {}, 1],
    "include_stop_str_in_output": [1, "true", []],
    "best_of": [0, -1, 129, 1.0, "2", True],
    "use_beam_search": [1, "true", []],
    "beam_width": [1, 0, -1, 129, 4.0, "4", True],
    "length_penalty": [-10.5, 10.5, "x", True, [], 1e308],
    "early_stopping": ["true", "Never", "", 1, 0, [], {}],
    "background": [1, "true", []],
    "priority": ["urgent", "", 0.5, 2**63, True, ["batch"]],
    "timeout": [0, -1, 3601, 1e308, "1", True, [], {}],
    "cache_salt": ["", "x" * 257, 1, True, ["x"], {}],
}


async def test_values_of_the_wrong_type_or_range(server: RunningGateway) -> None:
    for path in [CHAT, COMPLETIONS]:
        for name in WRONG:
            base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
            for value in WRONG[name]:
                await check(server, path, {**base, name: value}, 400, name, name)


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


BIASES: dict[str, tuple[Any, str, str]] = {
    "an array": ([[1, 2]], "logit_bias", "an object"),
    "a word": ({"hello": 1}, "logit_bias", "token ids as its keys"),
    "a fraction": ({"1.0": 1}, "logit_bias", "token ids as its keys"),
    "a digit of another script": ({"\u0665": 1}, "logit_bias", "token ids as its keys"),
    "below zero": ({"-1": 1}, "logit_bias", "token ids as its keys"),
    "behind the last one": ({"2147483647": 1}, "logit_bias", "the last one of the model"),
    "too large for anybody": ({"9999999999": 1}, "logit_bias", "the last one of the model"),
    "too much": ({"5": 101}, "logit_bias.5", "a number from -100 to 100"),
    "no number": ({"5": None}, "logit_bias.5", "a number from -100 to 100"),
    "too many": ({str(token_id): 1 for token_id in range(1025)}, "logit_bias", "at most 1024 tokens"),
}


async def test_a_bias_of_no_token_or_of_no_size(server: RunningGateway) -> None:
    for path in [CHAT, COMPLETIONS]:
        for name in BIASES:
            value, param, says = BIASES[name]
            base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
            await check(server, path, {**base, "logit_bias": value}, 400, param, says)


async def test_a_stop_token_that_is_none(server: RunningGateway) -> None:
    for path in [CHAT, COMPLETIONS]:
        for value, says in [
            (5, "an array of at most 64 token ids"),
            (["5"], "an array of at most 64 token ids"),
            ([True], "an array of at most 64 token ids"),
            ([-1], "an array of at most 64 token ids"),
            ([2147483647], "the last one of the model"),
            ([10**30], "the last one of the model"),
            ([1] * 65, "at most 64 token ids"),
        ]:
            base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
            await check(server, path, {**base, "stop_token_ids": value}, 400, "stop_token_ids", says)


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


def test_an_expiry_is_a_number_of_seconds() -> None:
    assert expires_after("x", {"anchor": "created_at", "seconds": 2_592_000}) == 2_592_000


# --- A call becomes one request per prompt, and metadata from which another gateway can render the answer -------------


def call(**more: object) -> Call:
    given = {"model": "m", "max_tokens": 8, "echo": True, "cache_salt": "salt", "metadata": (("a", "b"),)}
    given |= {"service_tier": "flex", "prompt_cache_key": "k", "stream_options": parameters.StreamOptions(True)}
    counts = {"max_num_seqs": 8, "max_n": 8, "max_prompts": 2, "max_choices": 8, "max_tools": 1}
    limits = RequestLimits(
        "m",
        100,
        vocab_size=10,
        special_tokens={},
        sampling_defaults={},
        max_schema_bytes=1,
        max_schema_depth=1,
        system_fingerprint="fp",
        **counts,
    )
    return Call.of({**given, **more}, {}).with_prompts([("a", [1, 2, 3]), ("b", [4])], limits, None)


def test_each_prompt_is_one_request_and_the_first_has_the_id_of_the_call() -> None:
    first, second = call().requests("abc")
    assert (first.id, first.prompt, first.cache_salt) == ("abc", (1, 2, 3), "salt")
    assert second.id != "abc"
    assert second.prompt == (4,)


def test_metadata_says_what_another_gateway_needs() -> None:
    metadata = call(stop=("x",), include_stop_str_in_output=True).metadata("chat", 7)
    assert (metadata.dialect, metadata.created, metadata.requests, metadata.prompt_tokens) == ("chat", 7, 2, 4)
    assert (metadata.echoes_prompt, metadata.logprobs, metadata.system_fingerprint) == (True, -1, "fp")
    assert (metadata.include_usage, metadata.stop, metadata.include_stop_str_in_output) == (True, ("x",), True)
    labels = (metadata.metadata, metadata.service_tier, metadata.prompt_cache_key)
    assert labels == ((("a", "b"),), "flex", "k")


def test_counts_name_the_parameters_that_choose_a_number_of_sequences() -> None:
    assert call(n=2).counts == {"n": 2}
    assert call(n=2, best_of=4).counts == {"n": 2, "best_of": 4}


@pytest.mark.parametrize(
    ("length", "side", "room", "expected"),
    [
        (None, "left", 2, [1, 2, 3, 4, 5]),
        (3, "left", 2, [3, 4, 5]),
        (3, "right", 2, [1, 2, 3]),
        (5, "left", 2, [1, 2, 3, 4, 5]),
        (9, "right", 2, [1, 2, 3, 4, 5]),
        (-1, "left", 2, [4, 5]),
        (-1, "right", 2, [1, 2]),
        (-1, "left", 7, [1, 2, 3, 4, 5]),
        (-1, "left", 0, []),
        (-1, "left", -3, []),
        (-1, "right", -3, []),
    ],
)
def test_a_longer_prompt_loses_tokens_on_one_side(
    length: int | None, side: str, room: int, expected: list[int]
) -> None:
    found = call(truncate_prompt_tokens=length, truncation_side=side)
    assert found.truncated([1, 2, 3, 4, 5], room) == expected


# --- The bodies of `/tokenize` and `/detokenize`: defaults and refusals -----------------------------------------------


TOKEN_REQUESTS_MESSAGES = [{"role": "user", "content": "x"}]


def test_special_tokens_are_by_default_for_prompts_only() -> None:
    assert read_tokenize({"prompt": "x"}).add_special_tokens is True
    assert read_tokenize({"prompt": "x", "add_special_tokens": False}).add_special_tokens is False
    chat = read_tokenize({"messages": TOKEN_REQUESTS_MESSAGES, "prompt": None})
    assert chat.conversation is not None
    assert (chat.conversation.add_generation_prompt, chat.return_token_strs) == (True, False)
    assert chat.conversation.add_special_tokens is False
    assert chat.conversation.messages == TOKEN_REQUESTS_MESSAGES


def test_a_conversation_has_tools_and_variables() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    found = read_tokenize(
        {"messages": TOKEN_REQUESTS_MESSAGES, "tools": [tool], "chat_template_kwargs": {"loud": True}}
    )
    assert found.conversation is not None
    assert [one.name for one in found.conversation.callable_tools] == ["add"]
    assert found.conversation.template_variables == {"loud": True}


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


def test_any_number_of_tokens_will_do() -> None:
    assert read_detokenize({"tokens": []}, 100) == ("", [])
    assert read_detokenize({"tokens": [0, 99], "model": "m"}, 100) == ("m", [0, 99])


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
BAD_MESSAGES: list[Any] = [
    None,
    "x",
    [],
    ["x"],
    [{"role": "robot", "content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{**USER_MESSAGE, "name": ""}],
    [{**USER_MESSAGE, "name": "x" * 257}],
    [{**USER_MESSAGE, "content": [{"type": "text", "text": "x", "other": 1}]}],
    [{**USER_MESSAGE, "refusal": "no"}],
    [{**USER_MESSAGE, "reasoning_content": "r"}],
    [{**USER_MESSAGE, "tool_calls": [CALL]}],
    [{**USER_MESSAGE, "tool_call_id": "call_1"}],
    [{**USER_MESSAGE, "other": []}],
    [ASSISTANT],
    [{**ASSISTANT, "tool_calls": []}],
    [{**ASSISTANT, "reasoning_content": ""}],
    [{**ASSISTANT, "content": "x", "reasoning_content": 5}],
    [{"role": "assistant", "tool_calls": [CALL] * 129}],
    schema_call(id=""),
    schema_call(type=None),
    schema_call(other=None),
    schema_call(function=None),
    schema_call(function={"name": "f"}),
    schema_call(function={"name": "a b", "arguments": "{}"}),
    schema_call(function={"name": "f", "arguments": {}}),
    schema_call(function={"name": "f", "arguments": "{}", "other": None}),
    [{**RESULT, "tool_call_id": None}],
    [{**RESULT, "content": None}],
    [{"role": "tool", "content": "x"}],
]
GOOD_PROMPTS: list[Any] = ["x", [1, 2], ["x", "y"], [[1], "x"]]
BAD_PROMPTS: list[Any] = [None, "", 5, [], [""], [[]], [-1], [[1.5]], [{}], [None]]


@pytest.mark.parametrize("value", GOOD_MESSAGES + BAD_MESSAGES)
def test_messages(value: Any) -> None:
    good = value in GOOD_MESSAGES
    assert Draft202012Validator(MESSAGES).is_valid(value) == good
    if good:
        read_messages(value)
    else:
        with pytest.raises(InvalidRequest):
            read_messages(value)


@pytest.mark.parametrize("value", GOOD_PROMPTS + BAD_PROMPTS)
def test_prompts(value: Any) -> None:
    good = value in GOOD_PROMPTS
    assert Draft202012Validator(PROMPT).is_valid(value) == good
    if good:
        read_prompts(value, 8, 100)
    else:
        with pytest.raises(InvalidRequest):
            read_prompts(value, 8, 100)

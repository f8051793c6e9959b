"""Values of parameters: the wrong type, out of range, unknown or not honoured, is a 400 that names the parameter."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api import parameters
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.refusals import CHAT, COMPLETIONS, USER, check
from tests.support.gateway.running import MODEL, RunningGateway, chat_body

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


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", WRONG)
async def test_values_of_the_wrong_type_or_range(server: RunningGateway, path: str, name: str) -> None:
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


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (name, path)
        for name in UNSUPPORTED
        for path, table in ((CHAT, parameters.CHAT), (COMPLETIONS, parameters.COMPLETIONS))
        if name not in table
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(server: RunningGateway, path: str, name: str) -> None:
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


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", BIASES)
async def test_a_bias_of_no_token_or_of_no_size(server: RunningGateway, path: str, name: str) -> None:
    value, param, says = BIASES[name]
    base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
    await check(server, path, {**base, "logit_bias": value}, 400, param, says)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (5, "an array of at most 64 token ids"),
        (["5"], "an array of at most 64 token ids"),
        ([True], "an array of at most 64 token ids"),
        ([-1], "an array of at most 64 token ids"),
        ([2147483647], "the last one of the model"),
        ([10**30], "the last one of the model"),
        ([1] * 65, "at most 64 token ids"),
    ],
)
async def test_a_stop_token_that_is_none(server: RunningGateway, path: str, value: Any, says: str) -> None:
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

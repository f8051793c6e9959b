"""Whatever is sent: an error in the shape of the OpenAI API that names the field, at once; no worker hears of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.gateway.fake_worker import emit
from tests.gateway.running import MODEL, RunningGateway, chat_body, raw_request, read_reply

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "Hello"}


@pytest.fixture
async def server(start_gateway: Any) -> AsyncIterator[RunningGateway]:
    """A gateway whose queue must still be untouched when the test is over."""
    gateway = await start_gateway(max_body_bytes=100_000, body_timeout_s=0.2, max_n=4, max_prompts=8, max_choices=16)
    yield gateway
    assert await gateway.accepted() == 0


async def check(gateway: RunningGateway, path: str, body: Any, status: int, param: str | None, says: str = "") -> None:
    began = asyncio.get_running_loop().time()
    reply = await gateway.post(path, body)
    took = asyncio.get_running_loop().time() - began
    assert (reply.status, reply.error["param"]) == (status, param), reply.error
    assert says in reply.error["message"]
    assert reply.headers["content-type"].startswith("application/json")
    assert len(reply.headers["x-request-id"]) == 32
    assert took < 1.0


MALFORMED = {
    "empty": (b"", "not JSON"),
    "cut": (b'{"model": "x"', "not JSON"),
    "an array": (b"[]", "must be a JSON object"),
    "a string": (b'"x"', "must be a JSON object"),
    "null": (b"null", "must be a JSON object"),
    "trailing": (b"{} {}", "not JSON"),
    "NaN": (b'{"temperature": NaN}', "NaN"),
    "Infinity": (b'{"temperature": -Infinity}', "Infinity"),
    "nested arrays": (b'{"messages": ' + b"[" * 60_000, "nested too deeply"),
    "nested objects": (b'{"a":' * 19_000, "nested too deeply"),
    "not UTF-8": (b'{"model": "\xff\xfe"}', "not UTF-8"),
    "UTF-16": ('{"model": "x"}'.encode("utf-16"), "not UTF-8"),
    "UTF-16 without mark": ('{"model": "x"}'.encode("utf-16-le"), "not JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "raw NUL": (b'{"model": "\x00"}', "not JSON"),
    "a number of 5000 digits": (b'{"seed": ' + b"1" * 5000 + b"}", "too long"),
}


@pytest.mark.parametrize(("body", "says"), MALFORMED.values(), ids=MALFORMED)
async def test_a_body_that_is_not_json(server: RunningGateway, body: bytes, says: str) -> None:
    await check(server, CHAT, body, 400, None, says)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_keys_that_occur_twice(server: RunningGateway, path: str) -> None:
    await check(server, path, b'{"model": "a", "model": "b"}', 400, "model", "twice")
    await check(server, path, b'{"model": "a", "x": {"y": 1, "y": 1}}', 400, "y", "twice")


@pytest.mark.parametrize("name", ["messages", "stop", "user", "metadata", "model"])
async def test_half_of_a_surrogate_pair(server: RunningGateway, name: str) -> None:
    await check(server, CHAT, f'{{"{name}": ["\\ud83d"]}}'.encode(), 400, name, "surrogate")
    await check(server, CHAT, f'{{"{name}": {{"\\uDE00x": 1}}}}'.encode(), 400, name, "surrogate")


async def test_a_whole_surrogate_pair_is_a_character(server: RunningGateway) -> None:
    await check(server, CHAT, b'{"model": "\\ud83d\\ude00", "messages": []}', 404, "model", "😀")


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
    "best_of": [0, -1, 129, 1.0, "2", True],
    "use_beam_search": [1, "true", []],
    "beam_width": [1, 0, -1, 129, 4.0, "4", True],
    "length_penalty": [-10.5, 10.5, "x", True, [], 1e308],
    "early_stopping": ["true", "Never", "", 1, 0, [], {}],
    "background": [1, "true", []],
    "priority": ["urgent", "", 0, True, ["batch"]],
    "timeout": [0, -1, 3601, 1e308, "1", True, [], {}],
    "cache_salt": ["", "x" * 257, 1, True, ["x"], {}],
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", WRONG)
async def test_values_of_the_wrong_type_or_range(server: RunningGateway, path: str, name: str) -> None:
    base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
    for value in WRONG[name]:
        await check(server, path, {**base, name: value}, 400, name, name)


async def test_a_number_that_is_infinite_after_parsing(server: RunningGateway) -> None:
    body = json.dumps(chat_body(temperature=1)).replace(": 1}", ": 1e999}")
    await check(server, CHAT, body.encode(), 400, "temperature", "inf")


UNSUPPORTED: dict[str, Any] = {
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "functions": [{}],
    "function_call": "auto",
    "audio": {},
    "modalities": ["text", "audio"],
    "prediction": {},
    "reasoning_effort": "high",
    "service_tier": "flex",
    "store": True,
    "user": "someone",
    "metadata": {"a": "b"},
    "web_search_options": {},
    "echo": True,
    "suffix": "x",
    "verbosity": "low",
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", UNSUPPORTED)
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
        "echo": False,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "parallel_tool_calls": None,
        "store": False,
        "metadata": {},
    }
    async with gateway.worker(emit([65])):
        assert (await gateway.chat(**nothing)).status == 200
        assert (await gateway.complete(**nothing)).status == 200


MESSAGES: dict[str, tuple[Any, str]] = {
    "none": ([], "messages"),
    "not an array": ("Hello", "messages"),
    "an object": ({"role": "user"}, "messages"),
    "a string inside": ([USER, "Hello"], "messages[1]"),
    "no role": ([{"content": "x"}], "messages[0].role"),
    "unknown role": ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    "tool role": ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
    "role of another type": ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    "no content": ([{"role": "user"}], "messages[0].content"),
    "null content": ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
    "content of another type": ([{"role": "user", "content": 5}], "messages[0].content"),
    "no parts": ([{"role": "user", "content": []}], "messages[0].content"),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "messages[0].content[0].type",
    ),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    "unknown key of a part": (
        [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}],
        "messages[0].content[0].cache_control",
    ),
    "a part that is a string": ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    "tool calls": ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
    "unknown key": ([{**USER, "surprise": 1}], "messages[0].surprise"),
    "name of another type": ([{**USER, "name": 1}], "messages[0].name"),
}


@pytest.mark.parametrize(("messages", "param"), MESSAGES.values(), ids=MESSAGES)
async def test_messages_that_are_none(server: RunningGateway, messages: Any, param: str) -> None:
    await check(server, CHAT, chat_body(messages=messages), 400, param, param)


async def test_a_content_without_parts_is_called_empty(server: RunningGateway) -> None:
    body = chat_body(messages=[{"role": "user", "content": []}])
    await check(server, CHAT, body, 400, "messages[0].content", "is an empty array; send at least one text part")


PROMPTS: dict[str, tuple[Any, str, str]] = {
    "empty": ("", "prompt", "empty"),
    "empty array": ([], "prompt", "empty"),
    "an empty one among others": (["x", ""], "prompt[1]", "empty"),
    "an empty array among others": ([[1], []], "prompt[1]", "empty"),
    "a number": (5, "prompt", "must be"),
    "an object": ({}, "prompt", "must be"),
    "a float among ids": ([1, 2.5], "prompt[1]", "token id"),
    "true among ids": ([1, True], "prompt[1]", "token id"),
    "a negative id": ([1, -1], "prompt[1]", "token id"),
    "an id over the vocabulary": ([1, 500], "prompt[1]", "0 to 451"),
    "a huge id": ([[2**70]], "prompt[0][0]", "token id"),
    "nested too far": ([[[1]]], "prompt[0][0]", "token id"),
    "text among ids": ([1, "x"], "prompt[1]", "token id"),
    "too many": (["x"] * 9, "prompt", "at most 8"),
    "longer than the context": ([1] * 512, "prompt", "maximum context length is 512 tokens"),
    "much longer than the context": ("x" * 20_000, "prompt", "maximum context length of 512 tokens"),
}


@pytest.mark.parametrize(("prompt", "param", "says"), PROMPTS.values(), ids=PROMPTS)
async def test_prompts_that_are_none(server: RunningGateway, prompt: Any, param: str, says: str) -> None:
    await check(server, COMPLETIONS, {"model": MODEL, "prompt": prompt}, 400, param, says)


async def test_more_than_the_context_holds(server: RunningGateway) -> None:
    reply = await server.complete(prompt=[1] * 500, max_tokens=20)
    assert reply.error["code"] == "context_length_exceeded"
    assert reply.error["message"].startswith(
        "This model's maximum context length is 512 tokens. However, you requested 520 tokens (500 in prompt, 20 in the"
    )
    reply = await server.chat(messages=[{"role": "user", "content": "x " * 2000}])
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "messages", "context_length_exceeded")


async def test_limits_of_this_server_are_named(server: RunningGateway) -> None:
    await check(server, CHAT, chat_body(n=5), 400, "n", "at most 4")
    await check(server, COMPLETIONS, {"model": MODEL, "prompt": ["x"] * 8, "n": 4}, 400, "n", "at most 16")
    await check(server, CHAT, chat_body(best_of=5), 400, "best_of", "best_of is 5; this server allows at most 4")
    await check(server, CHAT, chat_body(use_beam_search=True, beam_width=5), 400, "beam_width", "--max-n")
    many = {"model": MODEL, "prompt": ["x"] * 8}
    await check(server, COMPLETIONS, {**many, "best_of": 3}, 400, "best_of", "are 24; this server allows at most 16")
    await check(server, COMPLETIONS, {**many, "use_beam_search": True}, 400, "beam_width", "beam_width = 4 are 32")


async def test_no_call_asks_for_more_sequences_than_every_worker_runs(server: RunningGateway) -> None:
    async with server.worker(emit([65]), max_num_seqs=3), server.worker(emit([65]), max_num_seqs=2):
        await server.gateway.worker_registry.refresh()
        for asked, param in (
            ({"n": 3}, "n"),
            ({"best_of": 3}, "best_of"),
            ({"use_beam_search": True, "beam_width": 3}, "beam_width"),
            ({"use_beam_search": True}, "beam_width"),
        ):
            says = "at most 2 sequences at once (its setting --max-num-seqs)"
            await check(server, CHAT, chat_body(**asked), 400, param, says)
            await check(server, COMPLETIONS, {"model": MODEL, "prompt": "x", **asked}, 400, param, says)


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


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("asked", "param", "says"), RANKING.values(), ids=RANKING)
async def test_rankings_that_contradict_themselves(
    server: RunningGateway, path: str, asked: dict[str, Any], param: str, says: str
) -> None:
    base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
    await check(server, path, {**base, **asked}, 400, param, says)


async def test_a_salt_of_the_wrong_length_is_not_shown(server: RunningGateway) -> None:
    reply = await server.chat(cache_salt="secret" * 50)
    assert reply.error["message"] == "cache_salt must be a string of 1 to 256 characters, not of 300."


async def test_what_is_required(server: RunningGateway) -> None:
    await check(server, CHAT, {"messages": [USER]}, 400, "model", "required")
    await check(server, CHAT, {"model": MODEL}, 400, "messages", "required")
    await check(server, COMPLETIONS, {"model": MODEL, "prompt": None}, 400, "prompt", "required")


async def test_a_model_that_is_not_here(server: RunningGateway) -> None:
    for name in ("gpt-9", "", "x\r\nSet-Cookie: a", "\x00", "\u2028", "{braces}"):
        await check(server, CHAT, chat_body(model=name), 404, "model", "no model")
    reply = await server.get("/v1/models/gpt-9")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_paths_and_methods_that_are_not_here(server: RunningGateway) -> None:
    reply = await server.get("/v1/nothing")
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    reply = await server.get(CHAT)
    assert (reply.status, reply.error["code"], reply.headers["allow"]) == (405, "method_not_allowed", "POST")
    reply = await server.post("/v1/models", {})
    assert reply.status == 405


async def test_a_body_over_the_limit(server: RunningGateway) -> None:
    head = raw_request("POST", CHAT, b"", {"Content-Length": "1000000"})
    reply = await server.send(head)  # refused before any of it was sent
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    assert "100000 bytes" in reply.error["message"]


async def test_a_chunked_body_over_the_limit(server: RunningGateway) -> None:
    head = raw_request("POST", CHAT, b"", {"Content-Length": "", "Transfer-Encoding": "chunked"})
    chunk = b"2710\r\n" + b" " * 10_000 + b"\r\n"
    reply = await server.send(head + 11 * chunk)
    assert reply.status == 413


async def test_a_body_that_does_not_come(server: RunningGateway) -> None:
    reply = await server.send(raw_request("POST", CHAT, b"", {"Content-Length": "10"}))
    assert (reply.status, reply.error["code"]) == (408, "body_timeout")


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/healthz"), ("GET", "/nothing"), ("PUT", CHAT)])
async def test_an_expectation_that_no_server_knows(server: RunningGateway, method: str, path: str) -> None:
    """aiohttp answers it before anything else, in plain text."""
    before = server.gateway.meters.refusals["expectation_failed"]
    reply = await server.send(raw_request(method, path, b"{}", {"Expect": "tea"}))
    assert (reply.status, reply.error["code"]) == (417, "expectation_failed")
    assert reply.error["message"] == "The header Expect may only be 100-continue, not 'tea'; leave it out."
    assert reply.headers["content-type"].startswith("application/json")
    assert len(reply.headers["x-request-id"]) == 32
    assert reply.headers["server"] == "quire"
    assert server.gateway.meters.refusals["expectation_failed"] == before + 1


async def test_a_body_in_another_encoding_or_of_another_type(server: RunningGateway) -> None:
    for headers in ({"Content-Encoding": "gzip"}, {"Content-Type": "text/plain"}, {"Content-Type": ""}):
        reply = await server.post(CHAT, b"{}", **headers)
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


HTTP: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"hello\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50 + b"\r\n\r\n", 400),
    "both lengths": (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "negative length": (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
    "a header of 10 kB": (b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000 + b"\r\n\r\n", 431),
    "a path of 10 kB": (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n", 431),
    "10000 headers": (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n", 431),
    "NUL in a header": (b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n", 400),
}


@pytest.mark.parametrize(("data", "status"), HTTP.values(), ids=HTTP)
async def test_what_is_not_http(server: RunningGateway, data: bytes, status: int) -> None:
    reply = await server.send(data)
    assert reply.status == status
    assert reply.error["type"] == "invalid_request_error"
    # As of every answer: not which versions of what.
    assert (reply.headers["server"], reply.headers["x-content-type-options"]) == ("quire", "nosniff")


async def test_a_broken_chunk_is_the_clients_fault(server: RunningGateway) -> None:
    head = raw_request("POST", CHAT, b"", {"Content-Length": "", "Transfer-Encoding": "chunked"})
    reader, writer = await server.connect(head + b"zz\r\nnot a chunk\r\n")
    reply = await asyncio.wait_for(read_reply(reader), 10)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    writer.close()


async def test_after_all_that_the_gateway_still_answers(gateway: RunningGateway) -> None:
    for body, _ in MALFORMED.values():
        await gateway.post(CHAT, body)
    assert (await gateway.get("/healthz")).json == {"status": "ok"}


async def test_the_form_of_errors_is_frozen(server: RunningGateway) -> None:
    reply = await server.chat(temperature="hot")
    assert reply.body == (
        b'{"error": {"message": "temperature must be a number from 0 to 2, not \'hot\'.", '
        b'"type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}}'
    )
    reply = await server.chat(model="other")
    assert reply.body == (
        b'{"error": {"message": "There is no model \'other\' here; this server has \'test-model\'.", '
        b'"type": "invalid_request_error", "param": "model", "code": "model_not_found"}}'
    )


async def test_the_sdk_raises_its_own_exceptions(server: RunningGateway) -> None:
    import openai

    async with server.openai() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=[USER], temperature=9)  # type: ignore[list-item]
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=[USER])  # type: ignore[list-item]


async def test_a_fault_of_the_gateway_is_a_500_without_details(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*arguments: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(gateway.gateway.submission, "submit", broken)
    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (500, "internal")
    assert "secret" not in reply.error["message"]
    assert reply.headers["x-request-id"] in reply.error["message"]


async def test_text_that_becomes_a_token_which_no_worker_has_is_refused(start_gateway: Start) -> None:
    """A tokenizer may know more tokens than the model: such an id must not get into a step with other requests."""
    gateway = await start_gateway()
    async with gateway.worker(emit([65]), vocab_size=300):
        await gateway.gateway.worker_registry.refresh()
        reply = await gateway.chat()
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "vocabulary 300" in reply.error["message"]

"""Parameters about prompts, and the forms of prompts."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from quire.gateway.api.logprobs import PROMPT_PORTION
from quire.gateway.api.paging import AFTER, LIMIT, ORDER, ListQuery, PageQuery
from quire.gateway.api.prompt_parameters import MAX_PROMPT_VALUES, MAX_STREAMED_VALUES, check_prompt_size
from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.sse import BEGINNING, EventId
from quire.shared.protocol.messages import BY_TOKEN, Delta, GenerationRequest, Outcome, PromptReport
from quire.shared.protocol.messages.codec import pack_token_ids
from tests.gateway.api.test_logprobs import scored
from tests.gateway.api.test_resume import resumed, stream_path
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Script, Steps, emit
from tests.support.gateway.running import CONTEXT, MODEL, Event, RunningGateway, chat_body, check, texts, tokens

# --- Prompts in answers: echoed, scored, truncated, as token ids; whole, streamed, resumed, and refused if too --------


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ANSWER = "xé"


def report(request: GenerationRequest) -> PromptReport | None:
    """Return what an engine reports: everything that the request asks for, and nothing else."""
    top, records = request.sampling.prompt_logprobs, b""
    for at in range(1, len(request.prompt)):
        records += struct.pack("<fI", -at / 4, at + 1)
        records += b"".join(struct.pack("<If", 65 + rank, -rank) for rank in range(top))
    assert request.sampling.returns_prompt or top < 0
    if not request.sampling.returns_prompt:
        return PromptReport(3)
    return PromptReport(0, pack_token_ids(request.prompt), records if top >= 0 else None)


async def answering(request: GenerationRequest) -> Steps:
    """Emit ANSWER for each choice, or only the end if no token is wanted."""
    if not request.sampling.max_tokens:
        yield (), Outcome("length")
        return
    ids, params = tokens(ANSWER), request.sampling
    for at, token in enumerate(ids):
        last = at == len(ids) - 1
        deltas = tuple(
            scored(choice, [token], params.top_logprobs, "length" if last else None, at)
            if params.logprobs
            else Delta(choice, (token,), "length" if last else None)
            for choice in range(params.n)
        )
        yield deltas, Outcome("length") if last else None


def asks(prompt: Any = "Once 😀", **parameters: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "echo": True, **parameters}


async def choices(gateway: RunningGateway, body: dict[str, Any], script: Script = answering) -> list[dict[str, Any]]:
    async with gateway.worker(script, report=report):
        reply = await gateway.post(COMPLETIONS, body)
    assert reply.status == 200, reply.body
    found: list[dict[str, Any]] = reply.json["choices"]
    return found


# --- the log-likelihood pattern ---------------------------------------------------------------------------------------


async def test_an_echoed_prompt_is_scored_as_harnesses_expect(gateway: RunningGateway) -> None:
    for max_tokens in [0, 2]:
        prompts = ["Once 😀", tokens("two"), "x"]
        found = await choices(gateway, asks(prompts, logprobs=1, max_tokens=max_tokens, temperature=0))
        answer = ANSWER if max_tokens else ""
        assert [choice["text"] for choice in found] == [f"Once 😀{answer}", f"two{answer}", f"x{answer}"]
        for choice, prompt in zip(found, ("Once 😀", "two", "x"), strict=True):
            ids, more = tokens(prompt), tokens(answer)
            logprobs = choice["logprobs"]
            assert choice["finish_reason"] == "length"
            assert len(logprobs["tokens"]) == len(ids) + len(more)
            expected = [None, *(-at / 4 for at in range(1, len(ids))), *(-at / 4 for at in range(len(more)))]
            assert logprobs["token_logprobs"] == expected
            assert logprobs["top_logprobs"][0] is None
            alternatives = logprobs["top_logprobs"][1:]
            # The most probable token, and the token itself wherever it ranks.
            assert all(
                len(one) in (1, 2) and -at / 4 in one.values() for at, one in enumerate(alternatives[: len(ids) - 1], 1)
            )
            assert logprobs["text_offset"][0] == 0
            assert logprobs["text_offset"][len(ids) :] == [len(prompt) + at for at in (0, 1, 1)[: len(more)]]


async def test_without_log_probabilities_only_the_text_is_echoed(gateway: RunningGateway) -> None:
    [one, two] = await choices(gateway, asks(n=2))
    assert (one["text"], one["logprobs"]) == (two["text"], None) == ("Once 😀" + ANSWER, None)


async def test_prompt_logprobs_have_the_form_of_vllm(gateway: RunningGateway) -> None:
    ids = tokens("ab")
    [choice] = await choices(gateway, {"model": MODEL, "prompt": "ab", "prompt_logprobs": 2, "max_tokens": 0})
    assert choice["text"] == ""
    assert choice["logprobs"] is None
    [none, second] = choice["prompt_logprobs"]
    assert none is None
    assert second == {
        str(ids[1]): {"logprob": -0.25, "rank": 2, "decoded_token": "b"},
        "65": second["65"] | {"logprob": 0.0, "rank": 1},
        "66": second["66"] | {"logprob": -1.0, "rank": 2},
    }


async def test_a_chat_has_prompt_logprobs_beside_its_choices(gateway: RunningGateway) -> None:
    async with gateway.worker(answering, report=report) as worker:
        answer = (await gateway.chat(prompt_logprobs=0, return_token_ids=True, n=2)).json
    [request] = worker.claimed
    assert answer["prompt_token_ids"] == list(request.prompt)
    assert len(answer["prompt_logprobs"]) == len(request.prompt)
    assert [choice["token_ids"] for choice in answer["choices"]] == [tokens(ANSWER)] * 2
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]


async def test_echo_and_prompt_logprobs_each_show_their_own_alternatives(gateway: RunningGateway) -> None:
    [choice] = await choices(gateway, asks("ab", logprobs=0, prompt_logprobs=3, max_tokens=0))
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.25}]
    assert len(choice["prompt_logprobs"][1]) == 4


async def test_tokens_can_be_named_by_their_ids(gateway: RunningGateway) -> None:
    [choice] = await choices(gateway, asks("ab", logprobs=0, return_tokens_as_token_ids=True, max_tokens=1))
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in tokens("ab" + ANSWER)]
    async with gateway.worker(answering, report=report):
        chat = (await gateway.chat(logprobs=True, return_tokens_as_token_ids=True)).json
    names = [one["token"] for one in chat["choices"][0]["logprobs"]["content"]]
    assert names == [f"token_id:{one}" for one in tokens(ANSWER)]


# --- streams ----------------------------------------------------------------------------------------------------------


STREAMED: list[dict[str, Any]] = [
    {},
    {"logprobs": 1},
    {"logprobs": 1, "n": 2, "return_token_ids": True},
    {"logprobs": 0, "max_tokens": 0},
    {"max_tokens": 0, "n": 2},
    {"echo": False, "return_token_ids": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


def joined(events: list[Event], index: int) -> dict[str, Any]:
    """Return one choice of a stream in the form of a whole answer."""
    whole: dict[str, Any] = {"index": index, "text": "", "logprobs": None}
    for event in events:
        for choice in [] if event.data == "[DONE]" else event.data["choices"]:
            if choice["index"] != index:
                continue
            whole["text"] += choice["text"]
            if (scores := choice["logprobs"]) is not None:
                before = whole["logprobs"] or {name: [] for name in scores}
                whole["logprobs"] = {name: before[name] + scores[name] for name in scores}
            for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
                if name in choice and (name not in whole or choice[name] is not None):
                    whole[name] = choice[name]
            if "token_ids" in choice:
                whole["token_ids"] = whole.get("token_ids", []) + choice["token_ids"]
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("parameters", STREAMED)
@pytest.mark.parametrize("prompt", ["Once 😀", "a b " * PROMPT_PORTION], ids=["short", "long"])
async def test_a_stream_says_what_the_whole_answer_says_and_is_resumed_at_each_event(
    start_gateway: Start, parameters: dict[str, Any], prompt: str
) -> None:
    here, there = await start_gateway(), await start_gateway()
    prompt = prompt[: CONTEXT - 32]
    plain = {name: value for name, value in parameters.items() if name != "stream_options"}
    async with here.worker(answering, report=report):
        whole = (await here.post(COMPLETIONS, asks(prompt, **plain))).json
        async with here.stream(COMPLETIONS, asks(prompt, stream=True, **parameters)) as stream:
            events = await stream.rest()
    for choice in whole["choices"]:
        assert joined(events, choice["index"]) == choice
    places = [BEGINNING, *(event.id for event in events)]
    for index, place in enumerate(places):
        rest = await resumed((here, there)[index % 2], stream_path(COMPLETIONS, events[0]), place)
        assert rest == [event for event in events if event.id > place], place


async def test_a_running_stream_is_resumed_in_the_middle_of_its_prompt(start_gateway: Start) -> None:
    here, there = await start_gateway(), await start_gateway()
    go_on = asyncio.Event()

    async def script(request: GenerationRequest) -> Steps:
        yield (scored(0, tokens("x"), 0),), None
        await go_on.wait()
        yield (scored(0, tokens("y"), 0, "length", 1),), Outcome("length")

    prompt = tokens("a") * (PROMPT_PORTION + 9)
    body = asks(prompt, logprobs=0, stream=True, background=True)
    async with here.worker(script, report=report), here.stream(COMPLETIONS, body) as stream:
        begun = await stream.take(3)
        assert [event.id for event in begun] == [EventId(0, 1), EventId(0, 2), EventId(1)]
        assert [len(event.data["choices"][0]["logprobs"]["tokens"]) for event in begun] == [PROMPT_PORTION, 9, 1]
        calls = [
            asyncio.create_task(resumed(there, stream_path(COMPLETIONS, begun[0]), place))
            for place in (BEGINNING, EventId(0, 1), EventId(0, 2), EventId(1))
        ]
        await asyncio.sleep(0)
        go_on.set()
        events = begun + await stream.rest()
        for call, at in zip(calls, range(4), strict=True):
            assert await call == events[at:]


async def test_every_event_can_have_the_usage_so_far(gateway: RunningGateway) -> None:
    async with gateway.worker(answering, report=report):
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await gateway.events(CHAT, chat_body(stream=True, stream_options=options))
    usages = [event.data["usage"] for event in events[:-1]]
    prompt = usages[0]["prompt_tokens"]
    assert [usage["completion_tokens"] for usage in usages] == [event.id.tokens for event in events[:-1]]
    assert all(usage["total_tokens"] == prompt + usage["completion_tokens"] for usage in usages)
    assert usages[-1]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_the_token_ids_of_a_chat_come_before_its_text(gateway: RunningGateway) -> None:
    async with gateway.worker(answering, report=report) as worker:
        events = await gateway.events(CHAT, chat_body(stream=True, return_token_ids=True))
    [request] = worker.claimed
    assert events[1].data["prompt_token_ids"] == list(request.prompt)
    assert events[1].data["choices"] == []
    found = [one for event in events[2:-1] for choice in event.data["choices"] for one in choice.get("token_ids", [])]
    assert found == tokens(ANSWER)


# --- what ended a choice, the usage, the fingerprint ------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_reason_is_the_string_or_the_token_that_ended_the_choice(
    gateway: RunningGateway, stream: bool
) -> None:
    special = gateway.gateway.model.special_tokens["<|im_end|>"]
    plain = tokens("z")[0]

    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("a END")), "stop", "END"), Delta(1, (plain,), "stop", BY_TOKEN)), None
        yield (Delta(2, (special,), "stop", BY_TOKEN), Delta(3, (2,), "stop")), Outcome("stop")

    body = {"stop": ["END", "<|im_end|>"], "stop_token_ids": [plain], "n": 4}
    async with gateway.worker(script):
        if stream:
            events = await gateway.events(CHAT, chat_body(stream=True, **body))
            ends = [event.data["choices"][0] for event in events[:-1]]
            found = {one["index"]: one["stop_reason"] for one in ends if one["finish_reason"]}
        else:
            found = {one["index"]: one["stop_reason"] for one in (await gateway.chat(**body)).json["choices"]}
    assert found == {0: "END", 1: plain, 2: "<|im_end|>", 3: None}


async def test_special_tokens_are_text_if_it_is_asked_for(gateway: RunningGateway) -> None:
    special = gateway.gateway.model.special_tokens["<|im_end|>"]

    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, (*tokens("a"), special, *tokens("b"), 2), "stop"),), Outcome("stop")

    async with gateway.worker(script, report=report):
        plain, shown, ended = [
            (await gateway.complete(**asked)).json["choices"][0]["text"]
            for asked in (
                {},
                {"skip_special_tokens": False},
                {"skip_special_tokens": False, "include_stop_str_in_output": True},
            )
        ]
    assert (plain, shown, ended) == ("ab", "a<|im_end|>b", "a<|im_end|>b</s>")


async def test_the_fingerprint_names_weights_and_version_and_stays_with_a_call(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("a")), weights_digest="0a1b2c3d"):
        await gateway.gateway.worker_registry.refresh()
        async with gateway.stream(COMPLETIONS, {"model": MODEL, "prompt": "x", "stream": True}) as stream:
            events = await stream.rest()
    found = {event.data["system_fingerprint"] for event in events[:-1]}
    [fingerprint] = found
    assert fingerprint.startswith("fp_0a1b2c3d_")
    gateway.gateway.worker_registry.workers = ()
    assert gateway.gateway.limits.system_fingerprint != fingerprint
    rest = await resumed(gateway, stream_path(COMPLETIONS, events[0]), BEGINNING)
    assert rest == events


# --- prompts ----------------------------------------------------------------------------------------------------------


async def test_a_long_prompt_is_truncated(gateway: RunningGateway) -> None:
    for given, expected in [
        ({}, "abcdef"),
        ({"truncate_prompt_tokens": 4}, "cdef"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, "abcd"),
        ({"truncate_prompt_tokens": -1, "max_tokens": CONTEXT - 2}, "ef"),
    ]:
        async with gateway.worker(answering, report=report) as worker:
            assert (await gateway.complete(prompt="abcdef", **given)).status == 200
        assert list(worker.claimed[0].prompt) == tokens(expected)


async def test_a_chat_is_rendered_as_it_is_asked_for(gateway: RunningGateway) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}]
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOnce upon"
    for given, expected in (
        ({"continue_final_message": True}, turn),
        ({"continue_final_message": True, "add_generation_prompt": False}, turn),
        ({"add_generation_prompt": False}, f"{turn}<|im_end|>\n"),
        ({"add_generation_prompt": True}, f"{turn}<|im_end|>\n<|im_start|>assistant\n"),
    ):
        async with gateway.worker(answering, report=report) as worker:
            assert (await gateway.post(CHAT, chat_body(messages=messages, **given))).status == 200
        assert list(worker.claimed[0].prompt) == tokens(expected)


async def test_what_the_worker_is_asked_for(gateway: RunningGateway) -> None:
    for given, expected in (
        ({}, (-1, False)),
        ({"logprobs": 3}, (-1, False)),
        ({"echo": True}, (-1, True)),
        ({"echo": True, "logprobs": 3}, (3, True)),
        ({"prompt_logprobs": 5, "echo": True, "logprobs": 3}, (5, True)),
        ({"prompt_logprobs": 0}, (0, True)),
        ({"return_token_ids": True}, (-1, True)),
    ):
        async with gateway.worker(answering, report=report) as worker:
            assert (await gateway.complete(**given)).status == 200
        [request] = worker.claimed
        assert (request.sampling.prompt_logprobs, request.sampling.returns_prompt) == expected


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "only with echo or prompt_logprobs"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "only with echo or prompt_logprobs"),
    (COMPLETIONS, {"max_tokens": 0, "echo": True, "best_of": 2}, "best_of", "rank"),
    (COMPLETIONS, {"max_tokens": 0, "echo": True, "use_beam_search": True}, "use_beam_search", "rank"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    (COMPLETIONS, {"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs", "use_beam_search"),
    (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
    (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
    (CHAT, {"echo": True}, "echo", "not a parameter"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "both"),
    (COMPLETIONS, {"continue_final_message": True}, "continue_final_message", "not a parameter"),
    (COMPLETIONS, {"truncation_side": "left"}, "truncation_side", "only with truncate_prompt_tokens"),
    (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "or -1"),
    (COMPLETIONS, {"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "not supported"),
    (COMPLETIONS, {"allowed_token_ids": [10**6]}, "allowed_token_ids", "the last one of the model"),
    (COMPLETIONS, {"allowed_token_ids": [5], "bad_words": ["x"]}, "allowed_token_ids", "bad_words"),
    (COMPLETIONS, {"allowed_token_ids": [5], "min_tokens": 2}, "allowed_token_ids", "min_tokens"),
    (
        COMPLETIONS,
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "include_usage",
    ),
]


async def test_what_cannot_be_honoured_is_refused_by_name(gateway: RunningGateway) -> None:
    for path, given, param, says in REFUSED:
        base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
        await check(gateway, path, base | given, 400, param, says)


def test_the_prompts_of_an_answer_are_bounded() -> None:
    length = MAX_PROMPT_VALUES // 23
    about = CallMetadata("completion", 0, 1, False, (), 0, 0, False)
    scored_20 = replace(about, prompt_logprobs=20)
    check_prompt_size(scored_20, [[1] * length], is_stream=False)
    check_prompt_size(replace(about, n=128), [[1] * MAX_PROMPT_VALUES], is_stream=True)
    for n, prompts in ((2, [[1] * length]), (1, [[1] * length, [1] * 99])):
        with pytest.raises(InvalidRequest, match="shorter or fewer") as refusal:
            check_prompt_size(replace(scored_20, n=n), prompts, is_stream=False)
        assert refusal.value.param == "prompt_logprobs"
    echoed = replace(about, echoes_prompt=True, logprobs=0)
    length = MAX_STREAMED_VALUES // 3
    check_prompt_size(echoed, [[1] * length], is_stream=True)
    check_prompt_size(echoed, [[1] * (length + 1)], is_stream=False)
    with pytest.raises(InvalidRequest, match="in a stream"):
        check_prompt_size(echoed, [[1] * (length + 1)], is_stream=True)


async def test_texts_are_as_without_echo_after_the_prompt(gateway: RunningGateway) -> None:
    async with gateway.worker(answering, report=report):
        plain = await gateway.events(COMPLETIONS, asks(echo=False, stream=True))
        echoed = await gateway.events(COMPLETIONS, asks(stream=True))
    assert texts(echoed, 0) == ["Once 😀", *texts(plain, 0)]


# --- The query of a list ----------------------------------------------------------------------------------------------


def read(query: str, more: tuple[str, ...] = ()) -> PageQuery:
    return ListQuery(20, 100, (LIMIT, AFTER, *more)).read(make_mocked_request("GET", f"/?{query}"))


def test_defaults_and_given_values() -> None:
    assert read("") == PageQuery(20, "", "desc", {})
    assert read("limit=100&after=x&order=asc&by=y", (ORDER, "by")) == PageQuery(100, "x", "asc", {"by": "y"})


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=1.5", "limit"),
        ("limit=%D9%A1", "limit"),
        ("limit=1000000", "limit"),
        ("limit=1&limit=2", "limit"),
        ("after=a&after=b", "after"),
        ("order=asc", "order"),
        ("before=x", "before"),
    ],
)
def test_other_values_are_refused_by_name(query: str, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(query)
    assert caught.value.param == name


def test_an_order_is_one_of_two() -> None:
    with pytest.raises(InvalidRequest, match="order must be asc or desc, not 'up'"):
        read("order=up", (ORDER,))

"""Log-probabilities, from the items of a worker to the answers of clients."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.api import chat, completions
from quire.gateway.api.call import Call
from quire.gateway.api.logprobs import LEAST, ScoredTokens, generated_rows, of_chat, of_completion
from quire.gateway.api.parameters import COMPLETIONS as COMPLETION_PARAMETERS
from quire.gateway.api.parameters import read
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.model.token_texts import TokenTexts
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.sse import BEGINNING, EventId
from quire.gateway.stream.transcript import Transcript
from quire.gateway.stream.writer import PART_CHARACTERS, EventRenderer
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome, StepItem
from tests.gateway.api.test_resume import model
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Script, Steps
from tests.support.gateway.running import (
    MODEL,
    Event,
    RunningGateway,
    chat_body,
    check,
    parse_events,
    raw_request,
    tokens,
    until,
)
from tests.support.tokenizers import byte_level

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = [CHAT, COMPLETIONS]
EOS = 2
NEVER = float("-inf")
# The text has an emoji of several tokens in the middle, and ends with a prefix of the stop string.
TEXT = "a😀b <sto"


def record(logprob: float, *top: tuple[int, float]) -> bytes:
    return struct.pack("<f" + "If" * len(top), logprob, *(word for pair in top for word in pair))


def scored(choice: int, token_ids: Sequence[int], top: int, reason: str | None = None, first: int = 0) -> Delta:
    """Return a delta whose log-probabilities differ by token. Token i of a choice has -i / 4. The j-th alternative of
    token i is token 65 + j and has -j - i / 4."""
    records = b"".join(
        record(-(first + at) / 4, *((65 + rank, -rank - (first + at) / 4) for rank in range(top)))
        for at in range(len(token_ids))
    )
    return Delta(choice, tuple(token_ids), reason, logprobs=records)


def emit(text: str = TEXT, halt_at: int = -1, go_on: asyncio.Event | None = None) -> Script:
    """Return a script that emits the text for every choice, a token per step, with the requested alternatives."""

    async def script(request: GenerationRequest) -> Steps:
        sampling, ids = request.sampling, tokens(text)
        assert sampling.logprobs
        for at, token in enumerate(ids):
            if at == halt_at and go_on is not None:
                await go_on.wait()
            last = at == len(ids) - 1
            made = tuple(
                scored(choice, [token], sampling.top_logprobs, "length" if last else None, at)
                for choice in range(sampling.n)
            )
            yield made, Outcome("length") if last else None

    return script


def body(path: str, top: int = 2, **parameters: Any) -> dict[str, Any]:
    if path == CHAT:
        return chat_body(logprobs=True, top_logprobs=top, **parameters)
    return {"model": MODEL, "prompt": "Hello", "logprobs": top, **parameters}


def joined(choices: Sequence[dict[str, Any]]) -> Any:
    """Join the log-probabilities of one choice's events as in a whole answer."""
    found = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    return {
        name: None if found[0][name] is None else [entry for one in found for entry in one[name]] for name in found[0]
    }


def choices_of(events: Sequence[Event], choice: int) -> list[dict[str, Any]]:
    return [
        one for event in events if event.data != "[DONE]" for one in event.data["choices"] if one["index"] == choice
    ]


def text_of(choices: Sequence[dict[str, Any]]) -> str:
    return "".join(one["delta"].get("content") or "" if "delta" in one else one["text"] for one in choices)


# --- what is written --------------------------------------------------------------------------------------------------


async def test_a_chat_has_an_entry_for_each_token(gateway: RunningGateway) -> None:
    async with gateway.worker(emit("aé")), gateway.openai() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, n=2
        )
    for choice in answer.choices:
        assert choice.message.content == "aé"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        found = [(one.token, one.logprob, one.bytes) for one in choice.logprobs.content]
        assert found == [("a", 0.0, [97]), ("\ufffd", -0.25, [195]), ("\ufffd", -0.5, [169])]
        [alternatives] = [one.top_logprobs for one in choice.logprobs.content[1:2]]
        texts = byte_level_names(65, 66)
        assert [(one.token, one.logprob) for one in alternatives] == [(texts[0], -0.25), (texts[1], -1.25)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(
        len(one.logprobs.content or ()) for one in answer.choices if one.logprobs
    )


def byte_level_names(*token_ids: int) -> list[str]:
    texts = TokenTexts(byte_level())
    return [json.loads(texts[token_id].text) for token_id in token_ids]


async def test_a_completion_has_four_lists(gateway: RunningGateway) -> None:
    async with gateway.worker(emit("aéb")), gateway.openai() as client:
        answer = await client.completions.create(model=MODEL, prompt="x", logprobs=1)
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert choice.text == "aéb"
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs.token_logprobs == [0.0, -0.25, -0.5, -0.75]
    assert logprobs.text_offset == [0, 1, 1, 2]
    [likeliest] = byte_level_names(65)
    assert logprobs.top_logprobs == [{likeliest: -at / 4, token: -at / 4} for at, token in enumerate(logprobs.tokens)]


async def test_without_alternatives_each_token_is_alone(gateway: RunningGateway) -> None:
    for path in PATHS:
        async with gateway.worker(emit("ab")):
            [choice] = (await gateway.post(path, body(path, top=0))).json["choices"]
        if path == CHAT:
            assert [one["top_logprobs"] for one in choice["logprobs"]["content"]] == [[], []]
        else:
            assert choice["logprobs"]["top_logprobs"] == [{"a": 0.0}, {"b": -0.25}]


async def test_end_tokens_and_stop_strings_have_entries_too(gateway: RunningGateway) -> None:
    async def script(request: GenerationRequest) -> Steps:
        yield (scored(0, [*tokens("ab"), EOS], 0, "stop"), scored(1, tokens("ab END"), 0)), None
        yield (scored(1, tokens("x"), 0)._replace(finish_reason="stop", matched_stop="END"),), Outcome("stop")

    async with gateway.worker(script):
        ended, stopped = (await gateway.complete(logprobs=0, n=2, stop="END")).json["choices"]
    assert (ended["text"], stopped["text"]) == ("ab", "ab ")
    assert ended["logprobs"]["tokens"][-1:] == byte_level_names(EOS)
    assert ended["logprobs"]["text_offset"][-1] == 2
    assert "".join(stopped["logprobs"]["tokens"]) == "ab ENDx"


def completion(scored: ScoredTokens, texts: TokenTexts) -> Iterator[str]:
    return of_completion(lambda: generated_rows(scored), texts)


async def test_what_is_impossible_is_a_number_that_json_has() -> None:
    one = ScoredTokens((65,), record(NEVER, (66, -1e-7), (67, NEVER)), (0,))
    texts = TokenTexts(byte_level())
    [entry] = json.loads("".join(of_chat(one, texts)))["content"]
    assert (entry["logprob"], entry["top_logprobs"][1]["logprob"]) == (LEAST, LEAST)
    # A float32 survives rendering and parsing with the same bits.
    assert struct.pack("<f", entry["top_logprobs"][0]["logprob"]) == struct.pack("<f", -1e-7)
    assert json.loads("".join(completion(one, texts)))["token_logprobs"] == [LEAST]


@pytest.mark.parametrize("render", [of_chat, completion])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_pieces_make_one_json_of_any_length(render: Any, count: int) -> None:
    delta = scored(0, list(range(count)), 3)
    one = ScoredTokens(delta.token_ids, delta.logprobs or b"", tuple(range(count)))
    found = json.loads("".join(render(one, TokenTexts(byte_level()))))
    for entries in found.values():
        assert entries is None or len(entries) == count
    logprobs = [entry["logprob"] for entry in found["content"]] if render is of_chat else found["token_logprobs"]
    assert logprobs == [-at / 4 for at in range(count)]


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_the_events_of_a_stream_have_what_the_whole_answer_has(gateway: RunningGateway) -> None:
    for path in PATHS:
        for n in [1, 2]:
            async with gateway.worker(emit()):
                whole = (await gateway.post(path, body(path, n=n, stop="<stop>"))).json["choices"]
                events = await gateway.events(path, body(path, n=n, stop="<stop>", stream=True))
            for index, choice in enumerate(whole):
                assert joined(choices_of(events, index)) == choice["logprobs"]
            # Each token was sent with its own event id, though some tokens had no text yet.
            numbers = [event.id for event in events if not event.id.step]
            assert numbers == [EventId(at) for at in range(1, n * len(tokens(TEXT)) + 1)]


def portions(cuts: list[int], n: int) -> list[StepItem]:
    """Return all tokens, alternating between the choices, in items that end at `cuts`."""
    ids = tokens(TEXT)
    flat = [
        scored(choice, [token], 2, "length" if at == len(ids) - 1 else None, at)
        for at, token in enumerate(ids)
        for choice in range(n)
    ]
    items, start = [], 0
    for end in [*sorted({cut for cut in cuts if 0 < cut < len(flat)}), len(flat)]:
        deltas: list[Delta] = []
        for delta in flat[start:end]:
            if deltas and deltas[-1].choice == delta.choice:
                before = deltas.pop()
                records = (before.logprobs or b"") + (delta.logprobs or b"")
                delta = delta._replace(token_ids=before.token_ids + delta.token_ids, logprobs=records)
            deltas.append(delta)
        items.append(StepItem("r", start, tuple(deltas), Outcome("length") if end == len(flat) else None))
        start = end
    return items


@given(st.lists(st.integers(0, 24)), st.lists(st.integers(0, 24)), st.integers(1, 2), st.booleans(), st.data())
def test_a_stream_goes_on_though_its_tokens_now_come_in_other_portions(
    model_folder: Path, before: list[int], after: list[int], n: int, is_chat: bool, data: st.DataObject
) -> None:
    """Each token and its entry arrive once, wherever the client stopped in the earlier portions."""
    metadata = CallMetadata("chat" if is_chat else "completion", 0, n, False, ("<stop>",), 1, 1, False)
    form = (chat.ChatAnswer if is_chat else completions.CompletionAnswer)("r", model(model_folder), metadata)

    def events(cuts: list[int], last: EventId) -> list[Event]:
        transcript = Transcript(metadata, model(model_folder), ["r"])
        text = EventRenderer(transcript, form, {}, last).feed(portions(cuts, n))
        return parse_events(text) if text else []

    first = events(before, BEGINNING)
    left = data.draw(st.integers(0, len(first)))
    rest = events(after, first[left - 1].id if left else BEGINNING)
    for choice in range(n):
        whole = joined(choices_of(first, choice))
        assert joined(choices_of(first[:left] + rest, choice)) == whole
        assert text_of(choices_of(first[:left] + rest, choice)) == text_of(choices_of(first, choice)) == TEXT
        entries = whole["content"] if is_chat else whole["tokens"]
        assert len(entries) == len(tokens(TEXT))


# --- answers in one piece ---------------------------------------------------------------------------------------------


async def test_a_long_answer_is_sent_as_it_is_rendered(gateway: RunningGateway) -> None:
    for path in PATHS:
        count = 2000
        asks = body(path, top=20)
        async with gateway.worker(at_once(count)):
            async with aiohttp.ClientSession() as session, session.post(gateway.url + path, json=asks) as response:
                new = await response.text()
            # An HTTP/1.0 client sees the end of the answer when the connection closes.
            request = raw_request("POST", path, json.dumps(asks).encode(), {"Connection": "keep-alive"})
            request = request.replace(b"HTTP/1.1", b"HTTP/1.0")
            reader, writer = await gateway.connect(request)
            head, _, old = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
        assert len(new) > 4 * PART_CHARACTERS
        assert response.headers["Transfer-Encoding"] == "chunked"
        assert response.headers["Content-Type"] == "application/json; charset=utf-8"
        assert b"chunked" not in head
        for text in (new, old):
            [choice] = json.loads(text)["choices"]
            logprobs = choice["logprobs"]
            own = [one["logprob"] for one in logprobs["content"]] if path == CHAT else logprobs["token_logprobs"]
            assert own == [-at / 4 for at in range(count)]


def at_once(count: int) -> Script:
    async def script(request: GenerationRequest) -> Steps:
        yield (scored(0, tokens("a") * count, 20, "length"),), Outcome("length")

    return script


async def test_a_client_that_does_not_read_a_long_answer_is_cut(start_gateway: Start) -> None:
    gateway = await start_gateway(write_timeout_s=0.3)
    async with gateway.worker(at_once(4000)):
        request = raw_request("POST", CHAT, json.dumps(body(CHAT, top=20)).encode())
        parts = socket.socket()
        parts.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        parts.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(parts, ("127.0.0.1", gateway.port))
        await loop.sock_sendall(parts, request)

        async def cut() -> bool:
            return gateway.gateway.meters.slow_clients == 1

        await until(cut)
        # The gateway served other calls meanwhile, and serves them now.
        assert (await gateway.get("/healthz")).status == 200
        parts.close()


@pytest.mark.parametrize("path", PATHS)
async def test_ranked_choices_have_them_in_their_order(gateway: RunningGateway, path: str) -> None:
    async def script(request: GenerationRequest) -> Steps:
        deltas = (scored(0, tokens("best"), 1, "length"), scored(1, tokens("next one"), 1, "length"))
        yield tuple(delta._replace(score=-0.5 - delta.choice) for delta in deltas), Outcome("length")

    async with gateway.worker(script):
        choices = (await gateway.post(path, body(path, n=2, best_of=3))).json["choices"]
    for choice, text in zip(choices, ["best", "next one"], strict=True):
        logprobs = choice["logprobs"]
        names = [one["token"] for one in logprobs["content"]] if path == CHAT else logprobs["tokens"]
        assert "".join(names) == text


def test_what_would_not_fit_into_one_message_is_refused() -> None:
    """The worker sends all ranked choices together, in one message of at most 64 MiB."""
    counts = {"max_num_seqs": 64, "max_n": 16, "max_prompts": 1, "max_choices": 16}
    tools = {"max_tools": 1, "max_schema_bytes": 1, "max_schema_depth": 1}
    limits = RequestLimits(MODEL, 200_000, vocab_size=500, special_tokens={}, sampling_defaults={}, **counts, **tools)

    def call(**asked: Any) -> None:
        given = read({"model": MODEL, "prompt": "x", **asked}, COMPLETION_PARAMETERS)
        Call.of(given, {}).with_prompts([("prompt", [5])], limits, None)

    ranked = {"n": 4, "best_of": 5, "logprobs": 20}
    call(**ranked, max_tokens=99_000)
    with pytest.raises(InvalidRequest, match="lower max_tokens") as refusal:
        call(**ranked, max_tokens=100_000)
    assert refusal.value.param == "logprobs"
    # Accepted are fewer choices, fewer alternatives, or a request that streams its tokens step by step.
    for other in ({"n": 3}, {"logprobs": 19}, {"best_of": 4}):
        call(**(ranked | other), max_tokens=100_000)


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "asked", "expected"),
    [
        (CHAT, {}, (False, 0)),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, (False, 0)),
        (CHAT, {"logprobs": None, "top_logprobs": None}, (False, 0)),
        (CHAT, {"logprobs": True}, (True, 0)),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, (True, 20)),
        (COMPLETIONS, {}, (False, 0)),
        (COMPLETIONS, {"logprobs": None}, (False, 0)),
        (COMPLETIONS, {"logprobs": 0}, (True, 0)),
        (COMPLETIONS, {"logprobs": 20}, (True, 20)),
    ],
)
async def test_the_worker_gets_what_was_asked_for(
    gateway: RunningGateway, path: str, asked: dict[str, Any], expected: tuple[bool, int]
) -> None:
    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("a")), "length"),), Outcome("length")

    base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
    async with gateway.worker(script) as worker:
        reply = await gateway.post(path, base | asked)
    assert reply.status == 200
    [request] = worker.claimed
    assert (request.sampling.logprobs, request.sampling.top_logprobs) == expected


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"top_logprobs": 3}, "top_logprobs", "only with logprobs: true"),
    (CHAT, {"top_logprobs": 3, "logprobs": False}, "top_logprobs", "only with logprobs: true"),
    (CHAT, {"logprobs": True, "use_beam_search": True}, "logprobs", "use_beam_search"),
    (COMPLETIONS, {"logprobs": 0, "use_beam_search": True}, "logprobs", "use_beam_search"),
    (COMPLETIONS, {"top_logprobs": 3}, "top_logprobs", "not a parameter"),
    *((CHAT, {"logprobs": value}, "logprobs", "true or false") for value in (1, 0, "true", [], {})),
    *(
        (CHAT, {"logprobs": True, "top_logprobs": value}, "top_logprobs", "from 0 to 20")
        for value in (21, -1, 2.0, True)
    ),
    *((COMPLETIONS, {"logprobs": value}, "logprobs", "from 0 to 20") for value in (21, -1, 2.0, True, False, "3", [])),
]


async def test_what_cannot_be_had_is_refused_by_name(gateway: RunningGateway) -> None:
    for path, asked, param, says in REFUSED:
        base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "x"}
        await check(gateway, path, base | asked, 400, param, says)

"""The prefixes of calls, and the withdrawal of requests from workers that do not take them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from quire.gateway.features.affinity.beginnings import HASH_BYTES, MIN_INSTRUCTIONS, beginnings_of, hashed
from quire.gateway.features.affinity.service import MIN_PROMPT_TOKENS, Affinity, AffinityMeter, prefixes_of
from quire.shared.protocol.broker import Admission, Broker, QueueBounds
from quire.shared.protocol.messages import GenerationRequest, SamplingParams

TERMS = Admission("g", QueueBounds(10, 1000))
LONG = "You answer in one sentence. " * 20
PROMPT = tuple(range(MIN_PROMPT_TOKENS))
REQUEST = GenerationRequest("r", "m", PROMPT, SamplingParams(max_tokens=1))


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CHAT = [message("system", LONG), message("user", "Hello"), message("assistant", "Hi"), message("user", "How are you?")]


# --- beginnings -------------------------------------------------------------------------------------------------------


def test_the_turns_of_a_conversation_have_the_same_beginnings() -> None:
    first, instructions = beginnings_of(CHAT[:2], ["search"])
    assert (len(first), len(instructions)) == (HASH_BYTES, HASH_BYTES)
    assert beginnings_of(CHAT, ["search"]) == (first, instructions)
    other = [CHAT[0], message("user", "Good morning")]
    assert beginnings_of(other, ["search"])[0] != first
    assert beginnings_of(other, ["search"])[1] == instructions
    assert beginnings_of(CHAT, []) != (first, instructions)
    # The form of a text does not count.
    parts = [message("developer", [{"type": "text", "text": LONG}]), *CHAT[1:]]
    assert beginnings_of(parts, ["search"]) == (first, instructions)


def test_short_instructions_are_no_beginning_of_their_own() -> None:
    assert len(beginnings_of([message("system", "x" * (MIN_INSTRUCTIONS - 1)), CHAT[1]], [])) == 1
    assert len(beginnings_of([message("system", "x" * MIN_INSTRUCTIONS), CHAT[1]], [])) == 2
    assert len(beginnings_of([message("system", LONG)], [])) == 2
    assert len(beginnings_of([message("user", LONG), message("system", LONG)], [])) == 1
    assert len(beginnings_of([message("assistant", None)], [])) == 1


@given(st.lists(st.text() | st.binary()), st.lists(st.text() | st.binary()))
def test_different_parts_have_different_hashes(one: list[str | bytes], other: list[str | bytes]) -> None:
    def plain(parts: list[str | bytes]) -> list[bytes]:
        return [part.encode(errors="surrogatepass") if isinstance(part, str) else part for part in parts]

    assert (hashed(*one) == hashed(*other)) == (plain(one) == plain(other))


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_a_name_comes_before_the_first_messages_and_both_before_the_instructions() -> None:
    beginnings = beginnings_of(CHAT, [])
    unnamed = prefixes_of("", beginnings, REQUEST)
    named = prefixes_of("chat 7", beginnings, REQUEST)
    assert len(unnamed) == 2
    assert len(named) == 3
    assert len({*unnamed, *named}) == 4
    assert unnamed[-1] == named[-1]
    # Another conversation of this name, or the same one with fewer messages.
    assert prefixes_of("chat 7", beginnings_of(CHAT[2:], []), REQUEST)[1] == named[1]
    # Without messages the first tokens stand for the conversation.
    longer = replace(REQUEST, prompt=(*PROMPT, 5, 6))
    assert prefixes_of("", (), REQUEST) == prefixes_of("", (), longer)
    assert prefixes_of("", (), replace(REQUEST, prompt=(9, *PROMPT))) != prefixes_of("", (), REQUEST)


@pytest.mark.parametrize("field", ["cache_salt", "cache_scope", "adapter_digest"])
def test_requests_that_share_no_blocks_share_no_prefixes(field: str) -> None:
    fields: Any = {field: "another"}
    beginnings = beginnings_of(CHAT, [])
    own = prefixes_of("name", beginnings, REQUEST)
    assert not {*own} & {*prefixes_of("name", beginnings, replace(REQUEST, **fields))}


def test_a_prompt_that_is_soon_computed_or_computed_in_any_case_has_no_prefixes() -> None:
    for request in (
        replace(REQUEST, prompt=PROMPT[1:]),
        replace(REQUEST, pooling="last"),
        replace(REQUEST, sampling=SamplingParams(max_tokens=1, prompt_logprobs=0)),
    ):
        assert prefixes_of("name", beginnings_of(CHAT, []), request) == ()


# --- the service ------------------------------------------------------------------------------------------------------


class Live:
    def __init__(self, count: int) -> None:
        self.workers: Any = ("card",) * count


class Withdrawing:
    """A lane that notes what is withdrawn, and fails the first `failures` times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls: list[tuple[float, list[str]]] = []

    async def withdraw(self, request_ids: list[str]) -> int:
        self.calls.append((asyncio.get_running_loop().time(), request_ids))
        if len(self.calls) <= self.failures:
            raise RedisConnectionError("gone")
        return 1


def service(broker: Any, left_ms: int = 20, workers: int = 2, meter: AffinityMeter | None = None) -> Affinity:
    affinity = Affinity(Broker(Redis(), "lane"), Live(workers), left_ms, meter or AffinityMeter())
    affinity._withdraw = broker.withdraw
    return affinity


async def test_terms_have_prefixes_only_where_there_is_a_choice() -> None:
    broker = Withdrawing()
    assert service(broker).placed("", (), [REQUEST], TERMS) == TERMS._replace(
        prefixes=prefixes_of("", (), REQUEST), left_ms=20
    )
    assert service(broker, workers=1).placed("", (), [REQUEST], TERMS) == TERMS
    assert service(broker, left_ms=0).placed("", (), [REQUEST], TERMS) == TERMS
    assert service(broker).placed("", (), [REQUEST, REQUEST], TERMS) == TERMS


async def test_requests_are_withdrawn_after_their_time_and_together() -> None:
    broker, meter = Withdrawing(), AffinityMeter()
    affinity = service(broker, left_ms=40, meter=meter)
    affinity.start()
    began = asyncio.get_running_loop().time()
    affinity.note("a", True)
    affinity.note("other", False)
    affinity.note("b", True)
    await asyncio.sleep(0.02)
    assert broker.calls == []
    async with asyncio.timeout(30):
        while not broker.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    [(at, ids)] = broker.calls
    assert ids[0] == "a"
    assert at - began >= 0.04
    affinity.note("c", True)
    async with asyncio.timeout(30):
        while sum(len(ids) for _, ids in broker.calls) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert [one for _, ids in broker.calls for one in ids] == ["a", "b", "c"]
    await affinity.close()
    assert meter.left == 3
    assert meter.withdrawn == len(broker.calls)
    assert {family.name for family in meter.families()} == {"quire_prefix_left", "quire_prefix_withdrawn"}


async def test_a_redis_that_fails_does_not_end_the_withdrawals(caplog: pytest.LogCaptureFixture) -> None:
    broker = Withdrawing(failures=1)
    affinity = service(broker, left_ms=1)
    affinity.start()
    for name in ("a", "b"):
        affinity.note(name, True)
        async with asyncio.timeout(30):
            while not any(name in ids for _, ids in broker.calls):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    await affinity.close()
    assert "1 requests cannot be withdrawn" in caplog.text


async def test_without_a_time_nothing_runs() -> None:
    affinity = service(Withdrawing(), left_ms=0)
    affinity.start()
    assert affinity._task is None
    await affinity.close()

"""Streams that break, upstreams that are down, and what the answer says about it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from tokenizers import Tokenizer

from quire.shared.protocol.messages import StepItem
from tests.support.upstreams import FakeUpstream, Fault, answer
from tests.worker.upstream.conftest import executing

pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.mark.parametrize("kind", ["cut", "end", "error", "line", "json", "ids", "reason"])
async def test_a_broken_stream_is_continued_at_its_token(tokenizer: Tokenizer, kind: str) -> None:
    prompt = tokenizer.encode("the in", add_special_tokens=False).ids
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        upstream.faults += [Fault(kind, 7), Fault(kind, 5)]
        caller.add(prompt, max_tokens=30, min_tokens=9, seed=3)
        outcome = await caller.outcome()
    right = answer(prompt, 30, tokenizer)
    assert (outcome.name, outcome.is_exact) == ("length", False)
    assert caller.tokens() == right
    assert [body["prompt"] for body in upstream.bodies] == [prompt, prompt + right[:7], prompt + right[:12]]
    assert [body["max_tokens"] for body in upstream.bodies] == [30, 23, 18]
    assert [body.get("min_tokens") for body in upstream.bodies] == [9, 2, None]
    assert len({body["seed"] for body in upstream.bodies}) == 3, "no random number is drawn twice"
    (one,) = caller.pool.upstreams
    assert (one.num_breaks, one.num_continued, one.num_tokens) == (2, 2, 30)


async def test_an_answer_with_a_grammar_is_repeated_and_stays_exact(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("the in", add_special_tokens=False).ids
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        upstream.faults += [Fault("cut", 7), Fault("cut", 3), Fault("cut", 12)]
        caller.add(prompt, max_tokens=30, grammar='{"regex":".*"}', seed=3)
        assert (await caller.outcome()).is_exact
    assert caller.tokens() == answer(prompt, 30, tokenizer)
    assert [(body["prompt"], body["max_tokens"], body["seed"]) for body in upstream.bodies] == [(prompt, 30, 3)] * 4


async def test_an_answer_with_a_grammar_that_is_not_repeated_ends_with_an_error(tokenizer: Tokenizer) -> None:
    class Forgetful(FakeUpstream):
        async def _stream(self, request, body, context, count, event):  # type: ignore[no-untyped-def]
            return await super()._stream(request, body, [*context, len(self.bodies)], count, event)

    async with Forgetful(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        upstream.faults.append(Fault("cut", 7))
        caller.add("the", grammar='{"regex":".*"}')
        outcome = await caller.outcome()
    assert outcome.name == "error"
    assert "send the request again" in outcome.detail
    assert len(caller.tokens()) == 7


@pytest.mark.parametrize("kind", ["silence", "comments"])
async def test_a_silent_stream_counts_as_broken(tokenizer: Tokenizer, kind: str) -> None:
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream, idle_s=0.3) as caller:
        upstream.faults.append(Fault(kind, 4))
        caller.add("the")
        assert not (await caller.outcome()).is_exact
        assert len(caller.tokens()) == 20


@pytest.mark.parametrize("kind", ["vllm", "ids", "text", "llamacpp"])
async def test_text_that_is_continued_is_the_text_without_a_break(tokenizer: Tokenizer, kind: str) -> None:
    prompt = tokenizer.encode("the in", add_special_tokens=False).ids
    right = tokenizer.decode(answer(prompt, 60, tokenizer))
    async with FakeUpstream(tokenizer, kind, owner="").running() as upstream, executing(tokenizer, upstream) as caller:
        upstream.faults += [Fault("cut", 20), Fault("cut", 20)]
        caller.add(prompt, max_tokens=60)
        await caller.outcome()
    assert caller.text() == right


async def test_a_break_before_the_first_token_leaves_the_answer_exact(tokenizer: Tokenizer) -> None:
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        upstream.faults += [Fault("cut", 0), Fault("500")]
        caller.add("the", seed=5)
        assert (await caller.outcome()).is_exact
    assert [body["seed"] for body in upstream.bodies] == [5, 5, 5]


async def test_an_answer_that_another_worker_began_is_continued_and_marked(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("the in", add_special_tokens=False).ids
    async with FakeUpstream(tokenizer).running() as upstream:
        async with executing(tokenizer, upstream) as first:
            upstream.faults.append(Fault("silence", 6))
            first.add(prompt, n=2)
            await first.until(lambda: len(first.items.get("r1", ())) and len(first.tokens(choice=0)) >= 6)
            await first.until(lambda: len(first.tokens(choice=1)) == 20)
            logged: tuple[StepItem, ...] = tuple(first.items["r1"])
        async with executing(tokenizer, upstream) as second:
            second.add(prompt, logged, n=2)
            outcome = await second.outcome()
            assert second.items["r1"][0].start == logged[-1].end
            whole = answer(prompt, 20, tokenizer)
            assert second.tokens(choice=0) == whole[6:]
            assert second.tokens(choice=1) == [], "that choice had ended"
    assert not outcome.is_exact
    assert len(upstream.bodies) == 3


async def test_stop_strings_are_found_over_a_break(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("the", add_special_tokens=False).ids
    ids = answer(prompt, 60, tokenizer)
    place = next(at for at in range(10, 60) if "\ufffd" not in tokenizer.decode(ids[at - 3 : at + 3]))
    stop = tokenizer.decode(ids[place - 3 : place + 3])
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        upstream.faults.append(Fault("cut", place))
        caller.add(prompt, max_tokens=60, stop=(stop,))
        outcome = await caller.outcome()
    assert outcome.name == "stop"
    assert caller.tokens() == ids[: place + 3]


async def test_a_request_that_breaks_its_upstream_each_time_ends(tokenizer: Tokenizer) -> None:
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        upstream.faults += [Fault("cut", 0)] * 5
        caller.add("the")
        outcome = await caller.outcome()
        assert (outcome.name, len(upstream.bodies)) == ("error", 3)
        assert "3 streams broke" in outcome.detail
        upstream.faults.clear()
        caller.add("the", request_id="another")
        assert (await caller.outcome("another")).name == "length"


async def test_tokens_without_the_log_probabilities_that_were_asked_for_are_not_taken(tokenizer: Tokenizer) -> None:
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        caller.add("the", logprobs=True, top_logprobs=2)
        outcome = await caller.outcome()
    assert (outcome.name, caller.tokens()) == ("error", [])
    assert "log-probabilities" in outcome.detail


@pytest.mark.parametrize("fault", [Fault("400"), Fault("refusal", 0), Fault("refusal", 5)])
async def test_a_refusal_ends_the_request_with_the_reason(tokenizer: Tokenizer, fault: Fault) -> None:
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        upstream.faults.append(fault)
        caller.add("the")
        outcome = await caller.outcome()
    assert outcome.name == "error"
    assert "says the upstream" in outcome.detail or "not this prompt" in outcome.detail
    assert len(upstream.bodies) == 1


async def test_a_busy_upstream_is_asked_again_for_as_long_as_it_takes(tokenizer: Tokenizer) -> None:
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        upstream.faults += [Fault("503"), Fault("429"), Fault("503"), Fault("503"), Fault("503")]
        caller.add("the")
        outcome = await caller.outcome()
        assert (outcome.name, outcome.is_exact) == ("length", True)
        assert caller.pool.num_usable == 1


async def test_a_redirect_is_not_followed(tokenizer: Tokenizer) -> None:
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        upstream.faults.append(Fault("redirect"))
        caller.add("the")
        await caller.outcome()
    assert [body["max_tokens"] for body in upstream.bodies] == [20, 20]


async def test_a_second_upstream_continues_what_the_first_leaves(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = tokenizer.encode("the in", add_special_tokens=False).ids
    first, second = FakeUpstream(tokenizer, holds_after=20), FakeUpstream(tokenizer)
    async with AsyncExitStack() as servers, second.running():
        await servers.enter_async_context(first.running())
        async with executing(tokenizer, first, second) as caller:
            await caller.until(lambda: caller.pool.num_usable == 2)
            caller.add(prompt, max_tokens=40)
            await caller.until(lambda: caller.items.get("r1") and len(caller.tokens()) > 5)
            await servers.aclose()
            assert not (await caller.outcome()).is_exact
            assert caller.tokens() == answer(prompt, 40, tokenizer)
            await caller.until(lambda: caller.pool.num_usable == 1)
            assert caller.executor.free_rows == 8, "the second one takes new requests"
    assert len(second.bodies) == 1


async def test_nothing_is_claimed_while_no_upstream_answers_and_the_log_says_it_once(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    upstream = FakeUpstream(tokenizer, holds_after=20)
    async with upstream.running():
        pass  # its port is known, and free
    with caplog.at_level(logging.INFO):
        async with executing(tokenizer, upstream) as caller:
            await asyncio.sleep(0.5)
            assert caller.executor.free_rows == 0
            assert caller.executor.ticks > 0
            async with upstream.running():
                await caller.until(lambda: caller.executor.free_rows == 8)
                caller.add("the", max_tokens=60)
                await caller.until(lambda: caller.items.get("r1"))
            await caller.until(lambda: caller.executor.free_rows == 0)
            assert caller.items["r1"][-1].outcome is None, "the request waits"
            await asyncio.sleep(0.3)
            assert caller.executor.status.waiting == 1
            upstream.go_on.set()
            async with upstream.running():
                await caller.outcome()
                assert len(caller.tokens()) == 60
    told = [record.message for record in caplog.records if "cannot be used" in record.message]
    assert len(told) == 2, "once for each time that it went away"
    assert sum("answers:" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{}",
        '{"data": 5}',
        '{"data": [{"id": 7}]}',
        '{"data": [{"id": "tiny", "choices": [3]}], "choices": [3]}',
        "<",
    ],
)
async def test_a_server_of_something_else_is_not_used_and_ends_no_worker(tokenizer: Tokenizer, body: str) -> None:
    class Other(FakeUpstream):
        async def _models(self, request):  # type: ignore[no-untyped-def]
            return web.Response(text=body, content_type="application/json")

        async def _completions(self, request):  # type: ignore[no-untyped-def]
            return web.Response(text=body, content_type="application/json")

    async with Other(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        await caller.until(lambda: "asked yet" not in caller.pool.reasons[upstream.url])
        assert caller.pool.num_usable == 0
        await asyncio.sleep(0.2)
        assert caller.executor.failure is None


async def test_the_key_is_sent_and_told_to_nobody(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-a-secret-of-the-operator"
    with caplog.at_level(logging.DEBUG):
        async with FakeUpstream(tokenizer, key=key).running() as upstream:
            async with executing(tokenizer, upstream, key=key) as caller:
                caller.add("the")
                assert (await caller.outcome()).name == "length"
            async with executing(tokenizer, upstream, key="another-key") as caller:
                await caller.until(lambda: "refuses the key" in caller.pool.reasons[upstream.url])
            upstream.key = ""

            class Telling(FakeUpstream):
                async def _completions(self, request):  # type: ignore[no-untyped-def]
                    if (await request.json()).get("stream"):
                        raise web.HTTPBadRequest(text=f"you sent {request.headers}")
                    return await super()._completions(request)

            async with Telling(tokenizer).running() as telling, executing(tokenizer, telling, key=key) as caller:
                caller.add("the")
                outcome = await caller.outcome()
    assert upstream.headers[0]["Authorization"] == f"Bearer {key}"
    assert "you sent" in outcome.detail
    assert key not in outcome.detail
    assert key not in caplog.text


async def test_a_cancelled_request_closes_its_stream(tokenizer: Tokenizer) -> None:
    async with FakeUpstream(tokenizer, holds_after=20).running() as upstream, executing(tokenizer, upstream) as caller:
        caller.add("the", max_tokens=100, n=2)
        await caller.until(lambda: upstream.open == 2 and caller.items.get("r1"))
        caller.executor.finish("r1", "cancelled")
        assert (await caller.outcome()).name == "cancelled"
        await caller.until(lambda: not upstream.open)
        assert upstream.closed == 2
        assert caller.executor.free_rows == 8
        count = len(caller.items["r1"])
        await asyncio.sleep(0.1)
        assert len(caller.items["r1"]) == count, "no item follows the outcome"


async def test_a_dropped_attempt_emits_nothing_more(tokenizer: Tokenizer) -> None:
    async with FakeUpstream(tokenizer, holds_after=20).running() as upstream, executing(tokenizer, upstream) as caller:
        caller.add("the", max_tokens=100)
        await caller.until(lambda: caller.items.get("r1"))
        caller.executor.drop("r1", "another attempt")
        assert caller.executor.free_rows == 7
        caller.executor.drop("r1", "attempt of r1")
        count = len(caller.items["r1"])
        await caller.until(lambda: not upstream.open)
        assert len(caller.items["r1"]) == count
        assert caller.items["r1"][-1].outcome is None


async def test_stopping_closes_every_stream(tokenizer: Tokenizer) -> None:
    async with FakeUpstream(tokenizer, holds_after=20).running() as upstream:
        async with executing(tokenizer, upstream) as caller:
            for number in range(4):
                caller.add("the", request_id=f"r{number}", max_tokens=100)
            await caller.until(lambda: upstream.open == 4)
        await caller.until(lambda: not upstream.open)
        assert all(items[-1].outcome is None for items in caller.items.values())

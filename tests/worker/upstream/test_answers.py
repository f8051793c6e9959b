"""Answers of upstreams: their tokens, their parameters, and what is refused."""

from __future__ import annotations

import asyncio

import pytest
from tokenizers import Tokenizer

from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.upstream.requests import static_refusal
from tests.support.upstreams import FakeUpstream, answer
from tests.worker.upstream.conftest import answering, executing

pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.mark.parametrize("kind", ["vllm", "ids", "text", "llamacpp"])
async def test_an_answer_has_the_tokens_of_the_upstream(tokenizer: Tokenizer, kind: str) -> None:
    prompt = tokenizer.encode("the in", add_special_tokens=False).ids
    async with FakeUpstream(tokenizer, kind, owner="").running() as upstream, executing(tokenizer, upstream) as caller:
        caller.add(prompt, max_tokens=60)
        outcome = await caller.outcome()
    right = answer(prompt, 60, tokenizer)
    assert "é" in tokenizer.decode(right), "a character of several tokens is among them"
    assert (outcome.name, outcome.is_exact) == ("length", True)
    assert caller.text() == tokenizer.decode(right)
    if kind == "vllm":
        assert caller.tokens() == right
    sent = upstream.bodies[0]["prompt"]
    assert sent == ("the in" if kind == "text" else prompt)


async def test_the_first_token_that_the_upstream_puts_before_a_text_is_not_sent_twice(tokenizer: Tokenizer) -> None:
    bos = tokenizer.token_to_id("<|bos|>")
    upstream = FakeUpstream(tokenizer, "text", adds_bos=True)
    async with answering(upstream) as caller:
        caller.add([bos, *tokenizer.encode("the", add_special_tokens=False).ids])
        await caller.outcome()
    assert upstream.bodies[0]["prompt"] == "the"


async def test_an_upstream_that_puts_prompts_into_a_template_is_not_used(tokenizer: Tokenizer) -> None:
    class Templating(FakeUpstream):
        def _ids(self, prompt: object) -> list[int]:
            return super()._ids(f"<user>{prompt}" if isinstance(prompt, str) else prompt)

    async with Templating(tokenizer, "text").running() as upstream, executing(tokenizer, upstream) as caller:
        await caller.until(lambda: "template" in caller.pool.reasons[upstream.url])
        assert caller.executor.free_rows == 0


async def test_the_parameters_reach_the_upstream(tokenizer: Tokenizer) -> None:
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        caller.add(
            "the",
            max_tokens=5,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            seed=11,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            repetition_penalty=1.1,
            stop=("never",),
            stop_token_ids=(3,),
            logit_bias=((5, -2.0),),
            min_tokens=2,
            ignore_eos=True,
            bad_words=("bad",),
        )
        await caller.outcome()
    body = upstream.bodies[0]
    assert {name: body[name] for name in body if name not in ("prompt", "model", "stream", "return_token_ids")} == {
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "stop": ["never"],
        "stop_token_ids": [3],
        "logit_bias": {"5": -2.0},
        "min_tokens": 2,
        "ignore_eos": True,
        "bad_words": ["bad"],
        "skip_special_tokens": True,
    }


async def test_choices_are_streams_with_seeds_of_their_own(tokenizer: Tokenizer) -> None:
    async with FakeUpstream(tokenizer).running() as upstream, executing(tokenizer, upstream) as caller:
        caller.add("the", n=3, seed=2**64 - 1)
        assert (await caller.outcome()).name == "length"
        for choice in range(3):
            assert len(caller.tokens(choice=choice)) == 20
    assert sorted(body["seed"] % 2**64 for body in upstream.bodies) == [0, 1, 2**64 - 1]
    assert all(-(2**63) <= body["seed"] < 2**63 for body in upstream.bodies), "vLLM refuses others"


@pytest.mark.parametrize("kind", ["vllm", "text", "llamacpp"])
async def test_a_stop_string_ends_the_answer_and_the_stream(tokenizer: Tokenizer, kind: str) -> None:
    prompt = tokenizer.encode("the", add_special_tokens=False).ids
    whole = tokenizer.decode(answer(prompt, 60, tokenizer))
    stop = whole[20:23]
    upstream = FakeUpstream(tokenizer, kind, owner="", holds_after=40)
    async with answering(upstream) as caller:
        caller.add(prompt, max_tokens=60, stop=(stop,))
        outcome = await caller.outcome()
        await caller.until(lambda: not upstream.open)
    (delta,) = caller.items["r1"][-1].deltas
    assert (outcome.name, delta.finish_reason, delta.matched_stop) == ("stop", "stop", stop)
    assert caller.text() == whole[: whole.index(stop) + len(stop)]
    assert upstream.closed == 1


async def test_the_end_token_ends_the_answer(tokenizer: Tokenizer) -> None:
    class Ending(FakeUpstream):
        async def _send(self, response, data) -> None:  # type: ignore[no-untyped-def]
            if len(caller.items.get("r1", ())) == 3:
                data["choices"][0]["token_ids"] = [268]
            await super()._send(response, data)

    async with Ending(tokenizer, pause_s=0.02).running() as upstream, executing(tokenizer, upstream) as caller:
        caller.add("the")
        outcome = await caller.outcome()
        assert (outcome.name, caller.tokens()[-1], caller.items["r1"][-1].deltas[0].matched_stop) == ("stop", 268, None)


async def test_an_upstream_that_lacks_a_parameter_is_named_with_it(tokenizer: Tokenizer) -> None:
    upstream = FakeUpstream(tokenizer, "text", owner="")
    async with answering(upstream) as caller:
        await caller.until(lambda: caller.executor.free_rows)
        for number, (name, value) in enumerate(
            {"min_tokens": 3, "bad_words": ("a",), "stop_token_ids": (3,), "logprobs": True}.items()
        ):
            caller.add("the", request_id=f"r{number}", **{name: value})
            outcome = await caller.outcome(f"r{number}")
            assert outcome.name == "error"
            assert name in outcome.detail
    assert upstream.bodies == []


@pytest.mark.parametrize(
    ("kind", "grammar", "field"),
    [
        ("vllm", '{"json_schema":{"type":"object"}}', {"structured_outputs": {"json": {"type": "object"}}}),
        ("vllm", '{"regex":"a+"}', {"structured_outputs": {"regex": "a+"}}),
        ("vllm", '{"choice":["a","b"]}', {"structured_outputs": {"choice": ["a", "b"]}}),
        ("llamacpp", '{"json_schema":{"type":"object"}}', {"json_schema": {"type": "object"}}),
        ("vllm", '{"lark":"start: /a/"}', None),
        ("llamacpp", '{"regex":"a+"}', None),
        ("ids", '{"json_schema":{"type":"object"}}', None),
    ],
)
async def test_a_grammar_goes_to_an_upstream_that_takes_its_kind(
    tokenizer: Tokenizer, kind: str, grammar: str, field: dict[str, object] | None
) -> None:
    upstream = FakeUpstream(tokenizer, kind, owner="")
    async with answering(upstream) as caller:
        caller.add("the", grammar=grammar)
        outcome = await caller.outcome()
    if field is None:
        assert outcome.name == "error"
        assert "tools with enforced calls" in outcome.detail
        assert upstream.bodies == []
    else:
        assert outcome.name == "length"
        assert upstream.bodies[0].items() >= field.items()


async def test_another_upstream_takes_what_one_lacks(tokenizer: Tokenizer) -> None:
    poor, able = FakeUpstream(tokenizer, "text", owner=""), FakeUpstream(tokenizer)
    async with answering(poor, able) as caller:
        await caller.until(lambda: caller.pool.num_usable == 2)
        for number in range(4):
            caller.add("the", request_id=f"r{number}", min_tokens=3)
        for number in range(4):
            assert (await caller.outcome(f"r{number}")).name == "length"
    assert (len(poor.bodies), len(able.bodies)) == (0, 4)


@pytest.mark.parametrize(
    ("name", "fields", "sampling"),
    [
        ("embeddings", {"pooling": "last"}, {}),
        ("adapters", {"adapter": "a"}, {}),
        ("use_beam_search", {}, {"beam_width": 2}),
        ("best_of", {}, {"best_of": 3}),
        ("prompt_logprobs", {}, {"prompt_logprobs": 1}),
        ("forks", {"forked_from": "r0", "num_kept": 1}, {"grammar": "{}"}),
    ],
)
def test_what_no_upstream_can_do_is_refused_by_its_name(name: str, fields, sampling) -> None:  # type: ignore[no-untyped-def]
    request = GenerationRequest("r1", "tiny", (1, 2), SamplingParams(max_tokens=4, **sampling), **fields)
    assert name in static_refusal(request)


def test_an_ordinary_request_is_not_refused() -> None:
    assert static_refusal(GenerationRequest("r1", "tiny", (1, 2), SamplingParams(max_tokens=4, n=2, best_of=2))) == ""


async def test_a_request_that_is_too_wide_for_now_waits_for_rows(tokenizer: Tokenizer) -> None:
    upstream = FakeUpstream(tokenizer, pause_s=0.01)
    async with answering(upstream, max_num_seqs=3) as caller:
        await caller.until(lambda: caller.executor.free_rows)
        caller.add("the", n=2)
        caller.add("the", request_id="wide", n=3)
        assert caller.executor.free_rows < 0
        most = 0
        while "wide" not in caller.items or caller.items["wide"][-1].outcome is None:
            most = max(most, upstream.open)
            await asyncio.sleep(0.005)
    assert most == 3


async def test_requests_are_bounded_by_rows(tokenizer: Tokenizer) -> None:
    upstream = FakeUpstream(tokenizer, pause_s=0.02)
    async with answering(upstream, max_num_seqs=3) as caller:
        await caller.until(lambda: caller.executor.free_rows == 3)
        caller.add("the", n=2)
        assert caller.executor.free_rows == 1
        caller.add("the", request_id="wide", n=4)
        assert "--max-num-seqs" in (await caller.outcome("wide")).detail
        await caller.outcome()
        assert caller.executor.free_rows == 3

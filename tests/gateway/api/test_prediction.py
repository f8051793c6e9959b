"""The prediction of a chat reaches the worker as tokens, and its counts come back as usage; wrong ones are a 400."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.headers import NO_EFFECT_HEADER
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome, PredictionCounts
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Script, Steps, emit
from tests.support.gateway.running import CONTEXT, MODEL, RunningGateway, chat_body, tokens, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NO_EFFECT = NO_EFFECT_HEADER.lower()
TEXT = "Hello wörld 😀, how are you?"


def predicted(content: Any = TEXT, **others: Any) -> dict[str, Any]:
    return {"type": "content", "content": content, **others}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def counting(counts: PredictionCounts | None) -> Script:
    """Return a script that answers "ab" and ends with these counts."""

    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("ab")), "stop"),), Outcome("stop", prediction=counts)

    return script


async def assert_refused(gateway: RunningGateway, prediction: Any, param: str, says: str) -> None:
    """Check that a chat with this prediction is a 400 that names the parameter."""
    reply = await gateway.chat(prediction=prediction)
    assert (reply.status, reply.error["param"]) == (400, param), reply.error
    assert says in reply.error["message"]


@pytest.mark.parametrize("content", [TEXT, parts(TEXT), parts("Hello w", "ö", "", "rld 😀, how are you?")])
async def test_a_prediction_reaches_the_worker_as_the_tokens_of_its_text(gateway: RunningGateway, content: Any) -> None:
    async with gateway.worker(emit(tokens("abc"))) as worker:
        with_it, without = await gateway.chat(prediction=predicted(content)), await gateway.chat()
    first, second = worker.claimed
    assert list(first.prediction) == tokens(TEXT)
    assert second.prediction == ()
    assert (first.prompt, first.cost) == (second.prompt, second.cost)
    assert with_it.json["usage"] == without.json["usage"]
    assert NO_EFFECT not in with_it.headers


@pytest.mark.parametrize("content", ["", parts("", "")])
async def test_an_empty_prediction_is_none(gateway: RunningGateway, content: Any) -> None:
    async with gateway.worker(emit(tokens("abc"))) as worker:
        assert (await gateway.chat(prediction=predicted(content))).status == 200
        assert (await gateway.chat(prediction=None)).status == 200
    assert [request.prediction for request in worker.claimed] == [(), ()]


async def test_the_usage_has_the_counts_of_the_worker_streamed_and_whole(
    gateway: RunningGateway, start_gateway: Start
) -> None:
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 0}
    body = chat_body(prediction=predicted(), stream=True, background=True, stream_options={"include_usage": True})
    async with gateway.worker(counting(PredictionCounts(5, 0))):
        whole = (await gateway.chat(prediction=predicted())).json
        events = await gateway.events(CHAT, body)
        async with gateway.openai() as client:
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hello"}],
                prediction={"type": "content", "content": TEXT},
            )
        # Another gateway reads the answer from Redis.
        other = await start_gateway()
        async with other.stream(f"{CHAT}/{events[0].data['id']}/stream") as resumed:
            assert await resumed.rest() == events
    assert whole["usage"]["completion_tokens_details"] == details
    assert events[-2].data["usage"]["completion_tokens_details"] == details
    assert whole["usage"]["completion_tokens"] == len(tokens("ab"))
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 5
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 0


async def test_a_worker_that_does_not_speculate_counts_nothing(gateway: RunningGateway) -> None:
    async with gateway.worker(counting(None)):
        assert "completion_tokens_details" not in (await gateway.chat(prediction=predicted())).json["usage"]


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        ("text", "prediction", "must be an object"),
        ([TEXT], "prediction", "must be an object"),
        (5, "prediction", "must be an object"),
        ({"content": TEXT}, "prediction.type", "must be 'content', not null"),
        ({"type": "text", "content": TEXT}, "prediction.type", "must be 'content'"),
        ({"type": ["content"], "content": TEXT}, "prediction.type", "must be 'content'"),
        ({"type": "content"}, "prediction.content", "a string or an array"),
        (predicted(None), "prediction.content", "a string or an array"),
        (predicted(5), "prediction.content", "a string or an array"),
        (predicted({"type": "text", "text": TEXT}), "prediction.content", "a string or an array"),
        (predicted([]), "prediction.content", "is an empty array"),
        (predicted([TEXT]), "prediction.content[0]", "an object"),
        (predicted([*parts("a"), {"type": "image_url", "text": "b"}]), "prediction.content[1].type", "must be 'text'"),
        (predicted([{"type": "text", "text": 5}]), "prediction.content[0].text", "a string"),
        (predicted([{"type": "text", "text": "a", "x": 1}]), "prediction.content[0].x", "not supported"),
        (predicted(tokens=[1]), "prediction.tokens", "has type, content only"),
    ],
)
async def test_a_wrong_prediction_is_refused_by_name(
    gateway: RunningGateway, value: Any, param: str, says: str
) -> None:
    async with gateway.worker(emit(tokens("abc"))):
        await assert_refused(gateway, value, param, says)


async def test_a_prediction_is_at_most_as_long_as_the_context(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("abc"))) as worker:
        fits = await gateway.chat(prediction=predicted("é" * (CONTEXT // 2)))
        assert (fits.status, len(worker.claimed[0].prediction)) == (200, CONTEXT)
        for text in ("é" * (CONTEXT // 2) + "a", "a" * 100_000):
            says = f"maximum context length is {CONTEXT} tokens"
            await assert_refused(gateway, predicted(text), "prediction", says)


async def test_a_prediction_has_tokens_of_the_model(gateway: RunningGateway) -> None:
    [last] = tokens(" Boxkämpfer")
    prediction = predicted(" Boxkämpfer")
    async with gateway.worker(emit(tokens("abc"))) as worker:
        assert (await gateway.chat(prediction=prediction)).status == 200
        assert worker.claimed[0].prediction == (last,)
        assert max(worker.claimed[0].prompt) < last
        worker.vocab_size = last
        await worker.beat()

        async def is_known() -> bool:
            return gateway.gateway.limits.vocab_size == last

        await until(is_known)
        await assert_refused(gateway, prediction, "prediction", "prediction has a token that the model lacks")


async def test_a_completion_takes_no_prediction(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("abc"))) as worker:
        reply = await gateway.post(COMPLETIONS, {"model": MODEL, "prompt": "x", "prediction": predicted()})
    assert (reply.status, reply.headers[NO_EFFECT]) == (200, "prediction")
    assert worker.claimed[0].prediction == ()

"""The whole stack as a user sees it: `quire serve` with real processes and the `openai` SDK."""

from __future__ import annotations

import re
import time
import typing
from collections.abc import Iterator
from pathlib import Path

import anthropic
import anthropic.types
import jsonschema
import openai
import pydantic
import pytest
from redis import Redis
from tokenizers import Tokenizer

from quire.shared.protocol.keys import GROUP, LaneKeys
from quire.shared.protocol.messages import WorkerCard
from tests.conftest import QuireProcess, children_of, clean_environ
from tests.support.checkpoints import make_checkpoint

KEYS = LaneKeys("tiny")


class Stack:
    """A running `quire serve` of the tiny model in float32."""

    def __init__(self, process: QuireProcess, url: str, redis_socket: Path, model: Path) -> None:
        self.process = process
        self.url = url
        self.model = model
        self.redis = Redis(unix_socket_path=str(redis_socket))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def card(self) -> WorkerCard:
        """Return the worker's last heartbeat."""
        (name,) = self.redis.zrange(KEYS.workers, 0, -1)
        card = self.redis.hget(KEYS.worker(name.decode()), "card")
        assert card is not None
        return WorkerCard.decode(card)

    def wait(self, condition, timeout_s: float = 10.0) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    def assert_drained(self) -> None:
        """Check that every accepted request has one outcome, and that none is queued, running or holding a block."""
        self.wait(lambda: self.redis.xpending(KEYS.queue(), GROUP)["pending"] == 0)
        totals = {key.decode(): int(value) for key, value in self.redis.hgetall(KEYS.totals).items()}
        del totals["arrivals"]
        assert totals.pop("accepted") == sum(totals.values())
        assert self.redis.xlen(KEYS.queue()) == 0
        assert {int(value) for value in self.redis.hgetall(KEYS.load).values()} == {0}
        self.wait(lambda: self.card().free_blocks == self.card().total_blocks)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = tmp_path_factory.mktemp("models") / "tiny"
    make_checkpoint(model, "llama", max_position_embeddings=4096)
    state = tmp_path_factory.mktemp("state")
    arguments = ("serve", str(model), "--port", "0", "--state-dir", str(state), "--dtype", "float32")
    process = QuireProcess((*arguments, "--max-num-batched-tokens", "64"), clean_environ(), None)
    try:
        url = process.wait_ready()
        stack = Stack(process, url, state / "redis" / "redis.sock", model)
        yield stack
        stack.assert_drained()
        stack.redis.close()
        assert process.stop() == 0
    finally:
        process.close()


def test_streamed_pieces_are_the_whole_and_the_last_chunk_counts_them(stack: Stack) -> None:
    arguments = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 600, "seed": 5}
    arguments["extra_body"] = {"ignore_eos": True}
    with stack.client() as client:
        whole = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
        chunks = list(
            client.chat.completions.create(  # type: ignore[call-overload]
                **arguments, stream=True, stream_options={"include_usage": True}
            )
        )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 1
    counts = [usage.model_dump(exclude={"prompt_tokens_details"}) for usage in (chunks[-1].usage, whole.usage)]
    assert counts[0] == counts[1]
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_choices_and_prompts_of_one_call_come_back_in_their_order(stack: Stack) -> None:
    with stack.client() as client:
        answer = client.completions.create(model="tiny", prompt=["one", [5, 6, 7], "three"], n=2, max_tokens=8, seed=3)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert len({choice.text for choice in answer.choices}) == 6
        again = client.completions.create(model="tiny", prompt="three", n=2, max_tokens=8, seed=3)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices[4:]]


class Heron(pydantic.BaseModel):
    name: typing.Annotated[str, pydantic.Field(max_length=12)]
    colour: typing.Literal["grey", "white"]
    age: typing.Annotated[int, pydantic.Field(ge=0, le=99)]
    friends: typing.Annotated[list[typing.Literal["crane", "stork"]], pydantic.Field(max_length=2)]


@pytest.mark.slow
def test_an_answer_is_an_object_of_the_class_that_the_sdk_is_given(stack: Stack) -> None:
    """The tiny model, which produces random text otherwise."""
    messages: typing.Any = [{"role": "user", "content": "Which heron?"}]
    with stack.client() as client:
        for seed in range(4):
            parsed = client.chat.completions.parse(model="tiny", messages=messages, response_format=Heron, seed=seed)
            [choice] = parsed.choices
            assert isinstance(choice.message.parsed, Heron)
            assert choice.finish_reason == "stop"
            with client.chat.completions.stream(
                model="tiny", messages=messages, response_format=Heron, seed=seed
            ) as stream:
                [streamed] = stream.get_final_completion().choices
            assert streamed.message.parsed == choice.message.parsed


def test_a_message_that_must_use_a_tool_is_the_same_streamed_and_whole(stack: Stack) -> None:
    """The SDK of the Messages API. The model has random weights: only the grammar makes it call the tool."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    asked: dict[str, typing.Any] = {
        "model": "tiny",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "What is the weather?"}],
        "tools": [{"name": "get_weather", "description": "Tells the weather.", "input_schema": schema, "strict": True}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "extra_body": {"seed": 5},
    }
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        count = client.messages.count_tokens(
            **{name: asked[name] for name in ("model", "messages", "tools", "tool_choice")}
        )
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    for message in (whole, streamed):
        [use] = message.content
        assert isinstance(use, anthropic.types.ToolUseBlock)
        jsonschema.validate(use.input, schema)
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == count.input_tokens
    assert [block.to_dict() | {"id": ""} for block in whole.content] == [
        block.to_dict() | {"id": ""} for block in streamed.content
    ]
    assert whole.usage.output_tokens == streamed.usage.output_tokens


@pytest.mark.parametrize("text", ["<|im_start|>", "x"])
def test_a_text_ends_at_a_special_token_that_is_a_stop_string_and_at_any_stop_token(stack: Stack, text: str) -> None:
    """Logit bias forces one token. The special token has no text in an answer; the stop token has."""
    token = Tokenizer.from_file(str(stack.model / "tokenizer.json")).token_to_id(text)
    forced = {"model": "tiny", "prompt": "go on", "max_tokens": 6, "temperature": 0, "logit_bias": {str(token): 100}}
    by_text, by_id = {"stop": ["no such text", text]}, {"extra_body": {"stop_token_ids": [token]}}
    with stack.client() as client:
        whole = client.completions.create(**forced)
        assert whole.choices[0].text == ("" if text.startswith("<") else text * 6)
        assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 6)
        for stop in (by_text, by_id):
            answer = client.completions.create(**forced, **stop)
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
            assert answer.usage.completion_tokens == 1
            *_, last = client.completions.create(**forced, **stop, stream=True)
            assert last.choices[0].finish_reason == "stop"


def test_a_client_that_hangs_up_is_cancelled_while_it_runs(stack: Stack) -> None:
    with stack.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="for ever", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        before = int(stack.redis.hget(KEYS.totals, "cancelled") or 0)
        stream.close()
    stack.wait(lambda: int(stack.redis.hget(KEYS.totals, "cancelled") or 0) == before + 1)
    stack.wait(lambda: stack.card().running == 0)


def resident_mib(pid: int) -> float:
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1]) / 1024


def test_memory_stays_within_its_bounds(stack: Stack) -> None:
    by_name = {
        next((word for word in ("gateway", "worker") if f" {word} " in command), "redis"): pid
        for pid, command in children_of(stack.process.pid).items()
    }
    card = stack.card()
    # The tiny model: 3 layers, k and v, 2 heads of 16, float32.
    cache_mib = card.total_blocks * card.block_size * 3 * 2 * 2 * 16 * 4 / 2**20
    assert resident_mib(by_name["gateway"]) < 250
    assert resident_mib(by_name["worker"]) < cache_mib + 700

"""The whole stack as a user sees it: `quire serve` with real processes and the `openai` SDK."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
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
import torch
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


def hugging_face_text(model: Path, prompt: str, max_tokens: int) -> str:
    """Return the greedy continuation of a plain prompt by Transformers' `generate`."""
    from transformers import LlamaForCausalLM

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    out = network.generate(ids, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
    return text


@pytest.mark.slow
def test_a_completion_through_the_stack_is_what_hugging_face_generates(stack: Stack) -> None:
    with stack.client() as client:
        answer = client.completions.create(model="tiny", prompt="The thing in the inn", max_tokens=40, temperature=0)
    assert answer.choices[0].text == hugging_face_text(stack.model, "The thing in the inn", 40)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


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


def test_the_same_seed_gives_the_same_text_alone_and_among_many(stack: Stack) -> None:
    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model="tiny", prompt="once " * (i % 7 + 1), max_tokens=30, seed=i)
                    for i in range(48)
                )
            )
        return [answer.choices[0].text for answer in answers]

    together = asyncio.run(many())
    with stack.client() as client:
        for i in (0, 13, 47):
            alone = client.completions.create(model="tiny", prompt="once " * (i % 7 + 1), max_tokens=30, seed=i)
            assert alone.choices[0].text == together[i]


def test_choices_and_prompts_of_one_call_come_back_in_their_order(stack: Stack) -> None:
    with stack.client() as client:
        answer = client.completions.create(model="tiny", prompt=["one", [5, 6, 7], "three"], n=2, max_tokens=8, seed=3)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert len({choice.text for choice in answer.choices}) == 6
        again = client.completions.create(model="tiny", prompt="three", n=2, max_tokens=8, seed=3)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices[4:]]


def test_a_bias_forbids_a_token_and_another_one_makes_it_all_that_is_said(stack: Stack) -> None:
    arguments: dict[str, typing.Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0}
    with stack.client() as client:
        plain, forced, forbidden, same = (
            client.completions.create(**arguments, logit_bias=bias).choices[0].text
            for bias in (None, {"65": 100}, {"65": -100}, {"70": 0})
        )
    assert forced == forced[0] * 12
    assert forced[0] not in forbidden
    assert same == plain


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


class Nest(pydantic.BaseModel):
    kind: typing.Literal["nest"]
    built: datetime.date
    seen: datetime.datetime
    wakes: datetime.time


class Flock(pydantic.BaseModel):
    """A recursive model with branches that a field discriminates."""

    kind: typing.Literal["flock"]
    size: typing.Annotated[int, pydantic.Field(ge=0, le=9)]
    lives: Nest | Flock = pydantic.Field(discriminator="kind")


class Secrets(pydantic.BaseModel):
    """A model with every pydantic type that has a JSON schema format."""

    path: Path
    file: pydantic.FilePath
    content: bytes
    word: pydantic.SecretStr
    encoded: pydantic.Base64Str
    network: ipaddress.IPv6Network
    number: pydantic.UUID4
    by_path: dict[Path, int]


@pytest.mark.slow
def test_dates_and_classes_that_are_told_apart_are_those_of_pydantic(stack: Stack) -> None:
    wanted = {"name": "flock", "schema": Flock.model_json_schema()}
    with stack.client() as client:
        found = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Where?"}],
            response_format={"type": "json_schema", "json_schema": wanted},  # type: ignore[typeddict-item]
            n=8,
            seed=1,
            max_tokens=800,
        ).choices
    whole = [
        Flock.model_validate_json(choice.message.content or "") for choice in found if choice.finish_reason == "stop"
    ]
    assert len(whole) >= 4


def test_formats_of_pydantic_that_json_schema_lacks_are_accepted(stack: Stack) -> None:
    wanted = {"name": "secrets", "schema": Secrets.model_json_schema()}
    with stack.client() as client:
        [choice] = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Which?"}],
            response_format={"type": "json_schema", "json_schema": wanted},  # type: ignore[typeddict-item]
            max_tokens=20,
        ).choices
    assert (choice.message.content or "").startswith('{"path": "')


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


def test_a_stop_string_cuts_the_text_and_ends_the_request(stack: Stack) -> None:
    with stack.client() as client:
        whole = client.completions.create(model="tiny", prompt="stop me", max_tokens=40, temperature=0).choices[0].text
        at = next(i for i in range(4, len(whole)) if whole.index(whole[i : i + 3]) == i)
        stop = whole[at : at + 3]
        answer = client.completions.create(model="tiny", prompt="stop me", max_tokens=40, temperature=0, stop=stop)
        streamed = client.completions.create(
            model="tiny", prompt="stop me", max_tokens=40, temperature=0, stop=[stop], stream=True
        )
        pieces = "".join(chunk.choices[0].text for chunk in streamed)
    assert answer.choices[0].text == pieces == whole[:at]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 40


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


@pytest.mark.parametrize(
    ("arguments", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"max_tokens": 10_000}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "long " * 3000}, 400, "prompt"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"extra_body": {"guided_whitespace_pattern": " "}}, 400, "guided_whitespace_pattern"),
        ({"temperature": -1}, 400, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_and_bothers_no_worker(
    stack: Stack, arguments: dict[str, object], status: int, param: str
) -> None:
    accepted = stack.redis.hget(KEYS.totals, "accepted")
    with stack.client() as client, pytest.raises(openai.APIStatusError) as refusal:
        client.completions.create(**({"model": "tiny", "prompt": "a", "max_tokens": 4} | arguments))  # type: ignore[call-overload]
    assert refusal.value.status_code == status
    assert refusal.value.param == param
    assert stack.redis.hget(KEYS.totals, "accepted") == accepted


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

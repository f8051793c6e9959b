"""Images through HTTP, with real processes: the answer is that of Transformers, also after the death of the worker."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
import torch
from PIL import Image
from redis import Redis

from quire.shared.protocol.keys import LaneKeys
from tests.conftest import QuireProcess, children_of, clean_environ
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.faults import batches
from tests.support.faults.stack import Stream
from tests.support.vision_checkpoints import make_vision
from tests.support.vision_questions import KINDS, random_picture
from tests.test_adapter_calls import call

pytestmark = pytest.mark.slow

KEYS = LaneKeys("seeing")
IMAGE_TOKEN = VOCAB_SIZE
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_seeing(folder: Path, context: int = 2048) -> Path:
    """Write a tiny LLaVA whose tokenizer, template and processor know images."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    kind = KINDS["llava"]
    top = {"image_token_index": IMAGE_TOKEN, "image_token_id": IMAGE_TOKEN}
    make_vision(folder, "llava", kind.tower, top, max_position_embeddings=context, vocab_size=VOCAB_SIZE + 8)
    (folder / "preprocessor_config.json").write_text(json.dumps(kind.processor))
    processor = {"processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default"}
    processor["num_additional_image_tokens"] = 1
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    model = make_seeing(tmp_path_factory.mktemp("models") / "seeing")
    state = tmp_path_factory.mktemp("state")
    arguments = ("serve", str(model), "--port", "0", "--state-dir", str(state), "--dtype", "float32")
    process = QuireProcess((*arguments, "--lease-s", "1", "--beat-s", "0.2"), clean_environ(), None)
    try:
        url = process.wait_ready()
        with Redis(unix_socket_path=str(state / "redis" / "redis.sock")) as redis:
            yield SimpleNamespace(url=url, model=model, redis=redis, process=process, state=state)
        assert process.stop() == 0
    finally:
        process.close()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def ask(*pictures: bytes, text: str = "What is this?", **params: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return {"model": "seeing", "messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **params}


def chat(stack: SimpleNamespace, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = call(f"{stack.url}/v1/chat/completions", "POST", **body)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    draw = random.Random(5)
    return [random_picture(draw) for _ in range(3)]


def by_transformers(model: Path, token_ids: list[int], pictures: list[bytes], count: int) -> list[int]:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    reference = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    seen = processor([Image.open(io.BytesIO(data)).convert("RGB") for data in pictures], return_tensors="pt")
    ids = torch.tensor([token_ids])
    mask = torch.ones_like(ids)
    out = reference.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, **seen
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def test_an_answer_about_images_is_that_of_transformers_and_its_tokens_are_counted(
    stack: SimpleNamespace, pictures: list[bytes]
) -> None:
    body = ask(*pictures, return_token_ids=True)
    answer = chat(stack, body)
    status, counted = call(f"{stack.url}/tokenize", "POST", model="seeing", messages=body["messages"])
    assert status == 200, counted
    assert counted["tokens"].count(IMAGE_TOKEN) == 3 * 16
    assert answer["usage"]["prompt_tokens"] == counted["count"]
    found = answer["choices"][0]["token_ids"]
    assert found == by_transformers(stack.model, counted["tokens"], pictures, len(found))
    other = chat(stack, ask(*reversed(pictures), return_token_ids=True))
    assert other["choices"][0]["token_ids"] != found
    again = chat(stack, body)
    assert again["choices"][0]["token_ids"] == found
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= counted["count"] // 16 * 16 - 16


def test_an_answer_about_an_image_survives_the_death_of_its_worker(
    stack: SimpleNamespace, pictures: list[bytes]
) -> None:
    body = ask(pictures[0], max_tokens=900, temperature=1, seed=4, stream=True)
    right = Stream(stack.url, body, path="/v1/chat/completions").wait_end()
    stream = Stream(stack.url, body, path="/v1/chat/completions")
    stream.wait_events(3)
    [worker] = [pid for pid, command in children_of(stack.process.pid).items() if "worker" in command]
    os.kill(worker, signal.SIGKILL)
    assert not stream.is_complete
    stream.wait_end()
    assert stream.is_complete
    assert stream.text() == right.text()


def test_the_file_is_kept_once_and_goes_with_the_last_request(stack: SimpleNamespace) -> None:
    new = random_picture(random.Random(6))
    before = set(stack.redis.scan_iter(KEYS.image("*")))
    for text in "ab":
        chat(stack, ask(new, text=text))
    added = set(stack.redis.scan_iter(KEYS.image("*"))) - before
    assert len(added) == 2  # the file, and its users
    assert all(0 < stack.redis.ttl(key) <= 600 for key in added)


def test_every_dialect_shows_the_same_prompt(stack: SimpleNamespace, pictures: list[bytes]) -> None:
    """An image in a message, and one in the result of a tool."""
    first, second = map(data_url, pictures[:2])
    chatted = ask(pictures[0])
    asked = {name: chatted[name] for name in ("model", "temperature")} | {"max_tokens": 12}
    call_ = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chatted["messages"] += [
        {"role": "assistant", "tool_calls": [call_]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image_url", "image_url": {"url": second}}]},
    ]
    one = chat(stack, {**asked, "messages": chatted["messages"]})["choices"][0]["message"]["content"]
    text = {"type": "input_text", "text": "What is this?"}
    items = [
        {"role": "user", "content": [{"type": "input_image", "image_url": first}, text]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": second}]},
    ]
    responses = {"model": "seeing", "temperature": 0, "max_output_tokens": 12}
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        two = client.responses.create(input=items, **responses).output_text  # type: ignore[call-overload]
        begun = client.responses.create(input=items[:1], **responses)  # type: ignore[call-overload]
        later = client.responses.create(  # type: ignore[call-overload]
            input="And now?", previous_response_id=begun.id, **responses
        )
        assert later.usage.input_tokens > begun.usage.input_tokens

    def block(url: str) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        return {"type": "image", "source": source}

    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0) as claude:
        messages: Any = [
            {"role": "user", "content": [block(first), {"type": "text", "text": "What is this?"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [block(second)]}]},
        ]
        three = claude.messages.create(messages=messages, model="seeing", max_tokens=12, extra_body={"temperature": 0})
        counted = claude.messages.count_tokens(messages=messages, model="seeing").input_tokens
        assert counted == three.usage.input_tokens + (three.usage.cache_read_input_tokens or 0)
    assert one == two == "".join(part.text for part in three.content if part.type == "text")


def test_an_answer_about_an_image_is_forked_replayed_and_answered_in_a_batch(
    stack: SimpleNamespace, pictures: list[bytes]
) -> None:
    body = ask(pictures[2], max_tokens=20, return_token_ids=True)
    answer = chat(stack, body)
    tokens = answer["choices"][0]["token_ids"]
    status, rest = call(
        f"{stack.url}/v1/chat/completions/{answer['id']}/fork", "POST", at=8, temperature=0, return_token_ids=True
    )
    assert status == 200, rest
    assert rest["choices"][0]["token_ids"] == tokens[8:]
    command = [sys.executable, "-m", "quire", "replay", answer["id"], "--state-dir", str(stack.state)]
    command += ["--model", str(stack.model), "--dtype", "float32"]
    replay = subprocess.run(command, capture_output=True, text=True, env=clean_environ(), timeout=100, check=False)
    assert replay.returncode == 0, replay.stderr
    path = "/v1/chat/completions"
    lines = [{"custom_id": "0", "method": "POST", "url": path, "body": body}]
    batch = batches.ended(stack.url, batches.create(stack.url, lines, endpoint=path))
    assert batch.status == "completed", batch
    assert not batch.error_file_id, batches.read(stack.url, batch.error_file_id)
    [line] = batches.read(stack.url, batch.output_file_id)
    assert line["response"]["body"]["choices"][0]["token_ids"] == tokens


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.com/a.png", "does not fetch"),
        ("data:image/png;base64,AAAA", "not a PNG, JPEG, WebP or GIF"),
        ("data:image/png,abc", "base64"),
        ("x", "data URL"),
    ],
)
def test_what_is_no_image_is_refused_by_name(stack: SimpleNamespace, url: str, says: str) -> None:
    body = ask()
    body["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": url}})
    status, answer = call(f"{stack.url}/v1/chat/completions", "POST", **body)
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[1].image_url.url"), answer
    assert says in answer["error"]["message"]


def test_a_placeholder_in_a_text_is_no_image(stack: SimpleNamespace, pictures: list[bytes]) -> None:
    body = ask(pictures[0], text="<image> What does <image> mean?")
    status, counted = call(f"{stack.url}/tokenize", "POST", model="seeing", messages=body["messages"])
    assert status == 200, counted
    assert counted["tokens"].count(IMAGE_TOKEN) == 16
    assert chat(stack, body)["usage"]["prompt_tokens"] == counted["count"]

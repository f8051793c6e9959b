"""The checkpoint in models/demo-vision: complete, small, and it says what is in drawings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models.demo.training.vision.check import Asked, SeeingModel, questions
from models.demo.training.vision.dialogues import GREETING
from PIL import Image, ImageDraw

from quire.gateway.model.served_model import load_model

MODEL = Path(__file__).parents[4] / "models" / "demo-vision"
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}
LIMIT_BYTES = 6_000_000


@pytest.fixture(scope="module")
def model() -> Iterator[SeeingModel]:
    """Run torch on one thread: threads that wait for each other cost more than they save in a model so small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SeeingModel(str(MODEL))
    torch.set_num_threads(threads)


def circles_and_square() -> Image.Image:
    """A picture that the code of the training has not drawn."""
    image = Image.new("RGB", (480, 400), "white")
    pen = ImageDraw.Draw(image)
    pen.circle((100, 110), 60, fill="red")
    pen.circle((360, 100), 65, fill="red")
    pen.rectangle((170, 220, 290, 340), fill="blue")
    return image


def test_all_files_are_there_and_small() -> None:
    assert {file.name for file in MODEL.iterdir()} == FILES
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= LIMIT_BYTES


def test_the_gateway_knows_its_images() -> None:
    served = load_model(str(MODEL), "demo-vision")
    assert served.layout is not None
    assert served.layout.expand(480, 400).num_tokens == 64
    assert served.sampling_defaults["top_k"] == 1
    end = served.tokenizer.token_to_id("<|end|>")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((MODEL / name).read_text())["eos_token_id"] == end


def test_it_says_what_is_there(model: SeeingModel) -> None:
    image = circles_and_square()
    assert model.answer("What is in this picture?", image) == "Two red circles and a blue square."
    assert model.answer("How many circles are there?", image) == "There are two circles."
    assert model.answer("What colour is the square?", image) == "The square is blue."
    assert model.answer("Hello!") == GREETING


@pytest.mark.slow
def test_most_descriptions_of_other_drawings_are_right(model: SeeingModel) -> None:
    asked = [one for one in questions(60) if one.kind.startswith("shapes")]

    def is_right(one: Asked) -> bool:
        return model.answer(one.question, one.drawing.image) == one.right

    assert sum(map(is_right, asked)) >= 0.7 * len(asked)  # 35 of 45 on 2026-11-29

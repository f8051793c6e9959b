"""Vision-language checkpoints with image processors, random pictures, and questions about them."""

from __future__ import annotations

import hashlib
import io
import json
import random
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from quire import kernels
from quire.shared.protocol.messages import GenerationRequest, ImageRef, SamplingParams
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.images import ImageEmbedder
from quire.worker.engine.limits import IMAGE_CACHE_BYTES
from quire.worker.models.choice import choose_model, load_model
from quire.worker.models.vision.tower import VisionTower
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import make_engine
from tests.support.vision_checkpoints import make_vision

IMAGE_TOKEN = 5  # of all checkpoints of `vision_checkpoints`
MAX_TOKENS = 12
SQUARE = {"height": 56, "width": 56}
GRID = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56]]}
TOWER = {"num_hidden_layers": 3, "image_size": 56}


@dataclass(frozen=True)
class Kind:
    """The image processor and the sizes of a type of models."""

    processor: dict[str, Any]  # preprocessor_config.json
    arguments: dict[str, Any] = field(default_factory=dict)  # for the image processor, from that of the model
    tower: dict[str, Any] = field(default_factory=lambda: TOWER)
    top: dict[str, Any] = field(default_factory=dict)  # fields of config.json
    files: dict[str, Any] = field(default_factory=dict)  # processor_config.json
    run: int = 4  # image tokens between two tokens of text inside an image; 0: no text


KINDS = {
    "llava": Kind({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}, "crop_size": SQUARE}),
    "llava_next": Kind(
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": SQUARE,
            **GRID,
        },
        {"do_pad": True},
        top=GRID,
    ),
    "llava_onevision": Kind({"image_processor_type": "LlavaOnevisionImageProcessor", "size": SQUARE, **GRID}, top=GRID),
    "internvl": Kind(
        {"image_processor_type": "GotOcr2ImageProcessor", "size": SQUARE, "max_patches": 4},
        {"crop_to_patches": True},
        TOWER | {"image_size": [56, 56]},
    ),
    "mistral3": Kind(
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 140}, "patch_size": 14},
        {"patch_size": 28},
        files={"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
    ),
    "idefics3": Kind(
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
        },
        {"return_row_col_info": True},
    ),
    "smolvlm": Kind(
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
        },
        {"return_row_col_info": True},
    ),
}

KINDS["aya_vision"] = Kind(KINDS["internvl"].processor, {"crop_to_patches": True})
KINDS |= {
    name: Kind(
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 20},
        },
        tower={"depth": 2, "patch_size": 14},
        run=0,
    )
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
}


class Question(NamedTuple):
    """A prompt with images."""

    prompt: tuple[int, ...]
    images: tuple[ImageRef, ...]
    files: dict[str, bytes]

    def request(self, name: str, **sampling: Any) -> GenerationRequest:
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.0} | sampling)
        return GenerationRequest(name, "vision", self.prompt, params, images=self.images)


def make_model(folder: Path, name: str) -> Path:
    """Write a checkpoint of KINDS with the files of its processor."""
    kind = KINDS[name]
    make_vision(folder, name, kind.tower, kind.top, max_position_embeddings=512)
    (folder / "preprocessor_config.json").write_text(json.dumps(kind.processor))
    if kind.files:
        (folder / "processor_config.json").write_text(json.dumps(kind.files))
    return folder


def random_picture(draw: random.Random) -> bytes:
    """Return a PNG file of a random size: noise in large cells."""
    size = draw.randint(12, 200), draw.randint(12, 200)
    cells = np.random.default_rng(draw.randrange(1 << 30)).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(cells).resize(size, Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


class VisionFamily:
    """A checkpoint of KINDS, what the engine runs of it, and questions with the answers of Transformers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.kind = KINDS[name]
        self.path = make_model(folder / name, name)
        self.model = load_model(
            self.path, choose_model(self.path), kernels.select_ops("cpu", torch.float32), torch.device("cpu"), 512
        )
        assert isinstance(self.model.tower, VisionTower), self.model.why_no_images
        self.tower = self.model.tower
        self._draw = random.Random(3)
        self._reference: Any = None

    @cached_property
    def asked(self) -> list[Question]:
        """Eight questions about one to three pictures each."""
        return [self.ask([self.picture() for _ in range(1 + n % 3)]) for n in range(8)]

    @cached_property
    def expected(self) -> list[list[int]]:
        """The answers of Transformers to the questions."""
        return [self.by_transformers(question) for question in self.asked]

    def engine(self, max_bytes: int = IMAGE_CACHE_BYTES, **limits: Any) -> Engine:
        """Make an engine. max_bytes: of cached embeddings."""
        engine = make_engine(self.model, **limits)
        # A clock that stands still, so that the same steps are scheduled each time.
        engine.images = ImageEmbedder(self.tower, self.model.ops.device, max_bytes, clock=lambda: 0.0)
        return engine

    def engine_ahead(self, **limits: Any) -> Engine:
        """Make an engine that launches a step before it knows the tokens of the previous one."""
        sizes = self.engine(**limits).limits
        engine = Engine(self.model, sizes, self.model.config.eos_token_ids, None, runner=DeviceRunner)
        engine.checks_itself = True
        engine.images = ImageEmbedder(self.tower, self.model.ops.device, clock=lambda: 0.0)
        return engine

    def text(self, count: int) -> list[int]:
        return [self._draw.randrange(IMAGE_TOKEN + 1, VOCAB_SIZE - 3) for _ in range(count)]

    def ask(self, pictures: list[bytes]) -> Question:
        """Return a question about pictures, with random text around them and inside of them."""
        prompt, images = self.text(self._draw.randint(1, 20)), []
        for data in pictures:
            left, start = len(self.tower.embed([data])[0]), len(prompt)
            while left:
                count = min(left, self.kind.run or left)
                left -= count
                prompt += [IMAGE_TOKEN] * count + self.text(bool(left))
            images.append(ImageRef(digest_of(data), start, len(prompt) - start))
            prompt += self.text(self._draw.randint(0 if self.kind.run else 1, 9))
        prompt += self.text(1)
        return Question(tuple(prompt), tuple(images), {digest_of(data): data for data in pictures})

    def picture(self) -> bytes:
        return random_picture(self._draw)

    def by_transformers(self, question: Question) -> list[int]:
        """Return the greedy answer of Transformers, with an end token if there is one."""
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        if self._reference is None:
            model = AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float32).eval()
            self._reference = model, AutoImageProcessor.from_pretrained(self.path, backend="pil")
        model, processor = self._reference
        pictures = [Image.open(io.BytesIO(question.files[image.digest])).convert("RGB") for image in question.images]
        inputs = processor(images=pictures, return_tensors="pt", **self.kind.arguments)
        unused = ("rows", "cols", "num_patches")
        ids = torch.tensor([question.prompt])
        types = {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()} if "qwen" in self.path.name else {}
        out = model.generate(
            input_ids=ids,
            **types,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
            **{name: value for name, value in inputs.items() if name not in unused},
        )
        return out[0, ids.shape[1] :].tolist()


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def answer(engine: Engine, questions: list[Question], **sampling: Any) -> list[list[list[int]]]:
    """Ask all questions together. Returns the tokens by question and choice."""
    found: dict[str, list[list[int]]] = {}
    for number, question in enumerate(questions):
        request = question.request(str(number), **sampling)
        engine.add(request, pictures=question.files)
        found[request.id] = [[] for _ in range(request.sampling.n)]
    while engine.has_work:
        for item in engine.step():
            assert item.outcome is None or item.outcome.name in ("stop", "length"), item.outcome
            for delta in item.deltas:
                found[item.request_id][delta.choice] += delta.token_ids
    return list(found.values())

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
from quire.shared.images.layouts.families import THREE_AXES
from quire.shared.protocol.messages import GenerationRequest, ImageRef, SamplingParams
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.images import ImageEmbedder
from quire.worker.engine.limits import IMAGE_CACHE_BYTES
from quire.worker.models.choice import choose_model, load_model
from quire.worker.models.vision.families import FOR_TORCHVISION, preparation
from quire.worker.models.vision.torchvision_functions import image_processor_class
from quire.worker.models.vision.tower import VisionTower
from tests.support.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE
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
    model_type: str = ""  # if it is not the name of the kind
    text: dict[str, Any] = field(default_factory=dict)  # fields of the text model
    types: str = ""  # argument of Transformers that says which tokens are of images


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

KINDS["vipllava"] = Kind(KINDS["llava"].processor)
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
    for name in (
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        "exaone4_5",
    )
}
# Tokens of an image attend to each other in both directions, in layers with a window within this.
KINDS["gemma3"] = Kind(
    {"image_processor_type": "Gemma3ImageProcessor", "size": SQUARE, "do_pan_and_scan": None},
    top={"mm_tokens_per_image": 16},
    run=0,
    types="token_type_ids",
)
GEMMA4_TEXT = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "sliding_window": 24,
    "global_head_dim": 32,
}
# The larger models are those with such tokens, and the smaller ones those with inputs of layers and shared keys; here
# one has all of it.
KINDS["gemma4"] = Kind(
    {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 14, "max_soft_tokens": 70},
    tower={"patch_size": 14, "num_key_value_heads": 2, "position_embedding_size": 256, "standardize": True},
    run=0,
    text={
        **GEMMA4_TEXT,
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 2,
    },
    types="mm_token_type_ids",
)
KINDS["gemma4_with_audio"] = Kind(
    KINDS["gemma4"].processor,
    tower=KINDS["gemma4"].tower | {"use_clipped_linears": True},
    run=0,
    model_type="gemma4",
    text=GEMMA4_TEXT,
    types="mm_token_type_ids",
    top={
        "audio_config": {
            "model_type": "gemma4_audio",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [8, 8],
            "output_proj_dims": 32,
        }
    },
)
KINDS |= {
    name: Kind(
        {
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 28 * 28 * 20},
        },
        tower={"depth": 2, "patch_size": 14},
        run=0,
    )
    for name in ("glm4v", "glm4v_moe", "glm46v")
}
KINDS |= {
    "llama4": Kind(
        {"image_processor_type": "Llama4ImageProcessor", "size": SQUARE, "max_patches": 4},
        tower=TOWER | {"num_hidden_layers": 2},
    ),
    "cohere2_vision": Kind(
        {"image_processor_type": "Cohere2VisionImageProcessor", "size": SQUARE, "max_patches": 4, "patch_size": 2}
    ),
    "lfm2_vl": Kind(
        {
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": 14,
            "tile_size": 56,
            "min_image_tokens": 2,
            "max_image_tokens": 6,
            "max_tiles": 4,
            "max_pixels_tolerance": 1.5,
        },
    ),
    "kimi_k25": Kind(
        {"image_processor_type": "Kimi_K25ImageProcessor", "max_patches": 60, "patch_size": 14}, tower={}, run=0
    ),
    "minimax_m3_vl": Kind(
        KINDS["qwen2_vl"].processor | {"image_processor_type": "MiniMaxM3VLImageProcessor"}, tower={}, run=0
    ),
}
TWO_DENSE = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"]}
KINDS["dots3_note"] = Kind(KINDS["qwen2_vl"].processor | {"temporal_patch_size": 1}, tower=TWO_DENSE, run=0)


class Question(NamedTuple):
    """A prompt with images."""

    prompt: tuple[int, ...]
    images: tuple[ImageRef, ...]
    files: dict[str, bytes]

    def request(self, name: str, **sampling: Any) -> GenerationRequest:
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.0} | sampling)
        return GenerationRequest(name, "vision", self.prompt, params, images=self.images)


def make_model(folder: Path, name: str, **fields: Any) -> Path:
    """Write a checkpoint of KINDS with the files of its processor. fields: of the text model."""
    kind = KINDS[name]
    fields = {"max_position_embeddings": 512} | kind.text | fields
    make_vision(folder, kind.model_type or name, kind.tower, kind.top, **fields)
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

    def __init__(self, name: str, path: Path) -> None:
        """path: of the checkpoint, which is made unless it exists."""
        self.kind, self._has_axes = KINDS[name], name in THREE_AXES
        self.path = path if path.exists() else make_model(path, name)
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
        engine = make_engine(self.model, **({"max_num_batched_tokens": 96} if self.tower.most_whole else {}) | limits)
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
        return self._generate(question)[0]

    def by_transformers_beams(self, question: Question, count: int) -> list[list[int]]:
        """Return the results of a beam search of Transformers, each up to its end token."""
        found = self._generate(question, num_beams=count, num_return_sequences=count)
        return [row[: row.index(EOS_TOKEN_ID) + 1] if EOS_TOKEN_ID in row else row for row in found]

    def _generate(self, question: Question, **sizes: int) -> list[list[int]]:
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        if self._reference is None:
            model = AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float32).eval()
            processor = preparation(self.path, both_ways=True).processor
            if processor in FOR_TORCHVISION:
                images = image_processor_class(*FOR_TORCHVISION[processor]).from_pretrained(self.path)
            else:
                images = AutoImageProcessor.from_pretrained(self.path, backend="pil")
            self._reference = model, images
        model, processor = self._reference
        pictures = [Image.open(io.BytesIO(question.files[image.digest])).convert("RGB") for image in question.images]
        inputs = processor(images=pictures, return_tensors="pt", **self.kind.arguments)
        unused = ("rows", "cols", "num_patches", "aspect_ratios", "num_crops", "num_soft_tokens_per_image")
        ids = torch.tensor([question.prompt])
        name = self.kind.types or ("mm_token_type_ids" if self._has_axes else "")
        types = {name: (ids == IMAGE_TOKEN).int()} if name else {}
        out = model.generate(
            input_ids=ids,
            **types,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
            **sizes,
            **{name: _float32(value) for name, value in inputs.items() if name not in unused},
        )
        return out[:, ids.shape[1] :].tolist()


def _float32(values: Any) -> Any:
    """Return pixels in the type of the reference: those of Llama 4 are bfloat16."""
    return values.float() if isinstance(values, torch.Tensor) and values.is_floating_point() else values


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

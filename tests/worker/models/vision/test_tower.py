"""Which checkpoints have a vision tower, and the reason if one has none. Text is served in any case."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.shared.model.folder import CONFIG, WEIGHTS
from quire.worker import capacity
from quire.worker.engine.features.images import make_embedder
from quire.worker.engine.limits import IMAGE_CACHE_BYTES, EngineLimits
from quire.worker.engine.paged_model import PagedModel
from quire.worker.models.choice import choose_model, load_model
from quire.worker.models.native.image_rope import MAX_TOKENS
from quire.worker.models.vision.families import NoImages
from quire.worker.models.vision.tower import VisionTower, load_tower
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized import quantize_checkpoint
from tests.support.vision_checkpoints import make_vision
from tests.support.vision_questions import IMAGE_TOKEN, KINDS, VisionFamily, answer, make_model

pytest.importorskip("transformers")

IMAGES = "preprocessor_config.json"


def load(path: Path, dtype: torch.dtype = torch.float32, implementation: str = "auto") -> PagedModel:
    ops = kernels.select_ops("cpu", dtype)
    return load_model(path, choose_model(path, implementation), ops, torch.device("cpu"), 64)


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    return make_model(tmp_path / "llava", "llava")


def test_a_tower_has_no_weights_of_the_text_model_and_the_type_of_activations(llava: Path) -> None:
    model = load(llava, torch.bfloat16)
    assert (model.why_no_images, model.tower.image_token_id) == ("", IMAGE_TOKEN)
    tensors = load_file(llava / WEIGHTS)
    expected = sum(one.numel() for name, one in tensors.items() if "vision" in name or "projector" in name)
    assert sum(one.numel() for one in model.tower._model.parameters()) == expected
    assert {one.dtype for one in model.tower._model.parameters()} == {torch.bfloat16}


def test_only_tensors_of_neither_text_nor_tower_are_named_as_unused(
    llava: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(llava)
    assert not caplog.records
    save_file(load_file(llava / WEIGHTS) | {"depth_tower.weight": torch.ones(1)}, llava / WEIGHTS, {"format": "pt"})
    load(llava)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "1 tensors are not part of this model and are not used: depth_tower.weight"
    ]


def test_memory_for_images_is_set_aside(llava: Path) -> None:
    """A patch has 32 channels, 3 layers that are kept and 16 widths in a layer, in float32. A patch is a token."""
    model = load(llava)
    run = 64 * 32 * (3 + 16) * 4
    assert model.tower.run_bytes(64) == pytest.approx(run, rel=0.1)
    assert model.image_bytes == IMAGE_CACHE_BYTES + model.tower.run_bytes(model.max_model_len)


@pytest.mark.parametrize(("kind", "tokens", "patches"), [("qwen2_vl", 16, 4), ("gemma3", 16, 1)])
def test_memory_for_images_is_that_of_the_largest_image(kind: str, tokens: int, patches: int, tmp_path: Path) -> None:
    """Its layers have 32 channels, and none of them is kept. Patches of two moments count once."""
    tower = load_tower(make_model(tmp_path / kind, kind), torch.float32, "cpu", has_axes=True, both_ways=True)
    assert tower.run_bytes(1 << 20) == pytest.approx(tokens * patches * 32 * 16 * 4, rel=0.1)
    assert tower.run_bytes(4) == pytest.approx(4 * patches * 32 * 16 * 4, rel=0.1)


def test_images_take_memory_from_the_cache_and_leave_most_of_it(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(llava)
    monkeypatch.setattr(VisionTower, "run_bytes", lambda self, num_tokens: 1 << 40)
    monkeypatch.setattr(capacity, "available_memory", lambda: 1 << 20)
    settings = WorkerSettings(model=str(llava), device="cpu")
    with_images = capacity.choose_limits(settings, model, torch.device("cpu")).num_blocks
    model.tower = None
    without = capacity.choose_limits(settings, model, torch.device("cpu")).num_blocks
    assert without // 2 < with_images < without


def test_files_that_change_later_do_not_change_a_tower(llava: Path) -> None:
    tower = load(llava).tower
    before = [one.clone() for one in tower._model.parameters()]
    (llava / WEIGHTS).write_bytes(b"\xff" * (llava / WEIGHTS).stat().st_size)
    assert all(map(torch.equal, before, tower._model.parameters()))


def test_a_quantised_text_model_leaves_the_tower_alone(llava: Path) -> None:
    """The names are those of text models in wrappers, and at the top in older checkpoints."""
    tensors = load_file(llava / WEIGHTS)
    names = ("language_model.model.layers.0.mlp.up_proj.weight_scale", "model.layers.0.mlp.up_proj.qweight")
    scales = {name: torch.ones(1) for name in (*names, "lm_head.weight_scale")}
    save_file(tensors | scales, llava / WEIGHTS, {"format": "pt"})
    values = json.loads((llava / CONFIG).read_text())
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}
    (llava / CONFIG).write_text(json.dumps(values | {"quantization_config": quantization}))
    assert load_tower(llava, torch.float32, "cpu").image_token_id == IMAGE_TOKEN


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        *(("qwen3_vl", stored) for stored in ("gptq", "awq", "w4a16")),
        pytest.param("qwen3_vl", "fp8-block", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "gptq", marks=pytest.mark.slow),
    ],
)
def test_a_quantised_text_model_sees(kind: str, stored: str, tmp_path: Path) -> None:
    """The answers are those of Transformers for the weights that the codes stand for."""
    path = quantize_checkpoint(make_model(tmp_path / kind, kind), tmp_path / stored, stored)
    seeing = VisionFamily(kind, path)
    expected = VisionFamily(kind, path / "plain")
    questions = expected.asked[:3]
    assert [one[0] for one in answer(seeing.engine(num_blocks=120), questions)] == expected.expected[:3]


def without_processor(path: Path) -> None:
    (path / IMAGES).unlink()


def of_another_processor(path: Path) -> None:
    (path / IMAGES).write_text(json.dumps(KINDS["llava"].processor | {"processor_class": "OtherProcessor"}))


def without_a_weight(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    save_file({name: one for name, one in tensors.items() if "linear_1.bias" not in name}, path / WEIGHTS)


def with_a_scale(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    name = next(name for name in tensors if "projector" in name)
    save_file(tensors | {f"{name}_scale": torch.ones(1)}, path / WEIGHTS)


def with_an_infinite_weight(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    name = next(name for name in tensors if "projector" in name)
    tensors[name].view(-1)[0] = float("inf")
    save_file(tensors, path / WEIGHTS)


def without_the_token(path: Path) -> None:
    values = json.loads((path / CONFIG).read_text())
    del values["image_token_index"]
    (path / CONFIG).write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_processor, "preprocessor_config.json is missing or empty"),
        (of_another_processor, "images of OtherProcessor are not computed"),
        (without_a_weight, "has other weights of the vision tower than config.json describes"),
        (with_a_scale, "the vision tower is quantised"),
        (with_an_infinite_weight, "has values that are not finite as torch.float32"),
        (without_the_token, "image_token_index is missing"),
    ],
)
def test_a_checkpoint_whose_tower_is_not_loaded_says_why(
    change: Callable[[Path], None], reason: str, llava: Path
) -> None:
    change(llava)
    model = load(llava)
    assert model.tower is None
    assert model.why_no_images.startswith("this worker computes no images: ")
    assert reason in model.why_no_images


@pytest.mark.parametrize(
    ("kind", "implementation", "reason"),
    [
        (
            "gemma3",
            "transformers",
            "attention between the tokens of an image in both directions needs Quire's own decoder",
        ),
        ("emu3", "auto", "images that become tokens of the vocabulary are not computed"),
    ],
)
def test_models_whose_images_are_not_computed_say_why(
    kind: str, implementation: str, reason: str, tmp_path: Path
) -> None:
    model = load(make_vision(tmp_path / kind, kind), implementation=implementation)
    assert model.tower is None
    assert model.why_no_images == f"this worker computes no images: {reason}"


@pytest.mark.parametrize(
    ("kind", "window", "expected"),
    [
        ("gemma3", 8, {(16, 8): True, (16, 0): True}),
        ("gemma4", 24, {(16, 24): True, (32, 0): False}),
        ("gemma4", 100, {(16, 0): True, (32, 0): False}),  # longer than the context
        ("gemma4_with_audio", 24, {(16, 24): False, (32, 0): False}),
    ],
)
def test_the_self_test_knows_layers_in_which_tokens_of_an_image_see_each_other(
    kind: str, window: int, expected: dict[tuple[int, int], bool], tmp_path: Path
) -> None:
    model = load(make_model(tmp_path / kind, kind, sliding_window=window))
    uses = model.kernel_uses(16)
    assert uses is not None
    assert {(use.head_dim, use.window): use.has_key_ends for use in uses.attention} == expected


def test_a_text_model_without_axes_and_an_unknown_filter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoImages, match="three axes need a valid mrope_section"):
        load_tower(make_model(tmp_path / "qwen2_vl", "qwen2_vl"), torch.float32, "cpu", has_axes=False)
    llama4 = make_model(tmp_path / "llama4", "llama4")
    (llama4 / IMAGES).write_text(json.dumps(KINDS["llama4"].processor | {"resample": 1}))
    with pytest.raises(NoImages, match="resample of the image processor is 1; supported: 2 and 3"):
        load_tower(llama4, torch.float32, "cpu")


def test_models_of_text_take_no_images(tmp_path: Path) -> None:
    assert load(make_checkpoint(tmp_path / "llama", "llama")).why_no_images == "this model takes no images"


def test_a_model_whose_layers_get_more_of_an_image_takes_no_adapters(tmp_path: Path) -> None:
    assert not load(make_model(tmp_path / "qwen2_vl", "qwen2_vl")).why_no_adapters
    reason = load(make_model(tmp_path / "qwen3_vl", "qwen3_vl")).why_no_adapters
    assert "LoRA adapters are not computed next to images that go to several layers" in reason


def test_a_step_may_not_have_more_tokens_than_positions_with_axes(tmp_path: Path) -> None:
    model = load(make_model(tmp_path / "qwen2_vl", "qwen2_vl"))
    limits = EngineLimits(8, 16, 4, MAX_TOKENS, 64)
    assert make_embedder(model, limits) is not None
    assert make_embedder(model, replace(limits, max_num_batched_tokens=MAX_TOKENS + 1)) is None
    assert f"at most {MAX_TOKENS}" in model.why_no_images

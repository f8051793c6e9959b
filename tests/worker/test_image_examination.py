"""At start a miniature of a model must answer about images as Transformers does; else its text alone is served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire.shared.model.folder import CONFIG, WEIGHTS
from quire.shared.protocol.messages import SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.offline import generate
from quire.worker.models.native.image_rope import ImageRope
from quire.worker.models.vision.miniature import write_miniature
from quire.worker.models.vision.tower import VisionTower
from quire.worker.settings import WorkerSettings
from tests.support.vision_questions import KINDS, make_model

pytest.importorskip("transformers")

# Fields of config.json of Qwen2.5-VL-3B.
LARGE = {
    "image_token_id": 151_655,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "video_token_id": 151_656,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def settings(path: Path) -> WorkerSettings:
    return WorkerSettings(model=str(path), device="cpu", dtype="float32", kv_cache_gb=0.01, swap_gb=0.0)


@pytest.mark.parametrize(
    "name",
    [name if name in ("llava", "qwen3_vl", "gemma3") else pytest.param(name, marks=pytest.mark.slow) for name in KINDS],
)
def test_images_are_served_if_a_miniature_answers_as_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "quire.worker.image_examination"):
        engine = build_engine(settings(make_model(tmp_path / name, name)), name)
    assert engine.images is not None
    assert any("a small model answers as with Transformers" in record.message for record in caplog.records)


def test_positions_that_are_not_those_of_transformers_cost_images_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ImageRope, "place", lambda self, positions, embeddings: positions)
    engine = build_engine(settings(make_model(tmp_path / "qwen2_vl", "qwen2_vl")), "m")
    assert engine.images is None
    assert "after an image differs from that of Transformers by" in engine.runner.model.why_no_images
    assert [record.message for record in caplog.records if "serves text alone" in record.message]
    assert generate(engine, [(3, 4)], SamplingParams(max_tokens=2, ignore_eos=True)) != []


def test_embeddings_that_are_not_those_of_transformers_cost_images_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = VisionTower.embed
    monkeypatch.setattr(VisionTower, "embed", lambda *call: [one.flip(0) for one in embed(*call)])
    engine = build_engine(settings(make_model(tmp_path / "llava", "llava")), "m")
    assert "that of Transformers" in engine.runner.model.why_no_images


def test_images_of_a_model_without_a_miniature_are_served_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a field")

    monkeypatch.setattr("quire.worker.models.vision.miniature.answer_by_transformers", fail)
    engine = build_engine(settings(make_model(tmp_path / "llava", "llava")), "m")
    assert engine.images is not None
    assert [record for record in caplog.records if "could not be examined (KeyError: 'a field')" in record.message]


def test_several_ranks_serve_text_alone_and_say_so(tmp_path: Path) -> None:
    path = make_model(tmp_path / "llava", "llava")
    asked = replace(settings(path), tensor_parallel_size=2, threads=1, kernels="reference")
    engine = build_engine(asked, "m")
    try:
        assert "images need --tensor-parallel-size 1" in engine.runner.model.why_no_images
        assert generate(engine, [(3, 4)], SamplingParams(max_tokens=2, ignore_eos=True)) != []
    finally:
        engine.close()


def test_a_miniature_of_a_large_model_is_small_and_keeps_what_positions_depend_on(tmp_path: Path) -> None:
    large = make_model(tmp_path / "large", "qwen2_5_vl")
    fields = json.loads((large / CONFIG).read_text())
    (large / CONFIG).write_text(json.dumps({name: fields[name] for name in ("architectures", "model_type")} | LARGE))
    folder = tmp_path / "small"
    folder.mkdir()
    miniature = write_miniature(large, folder, is_narrow=True)
    assert (folder / WEIGHTS).stat().st_size < 20 << 20
    small = json.loads((folder / CONFIG).read_text())
    assert small["text_config"]["rope_parameters"] == LARGE["text_config"]["rope_parameters"]  # type: ignore[index]
    assert small["text_config"]["hidden_size"] == 2 * 128
    assert small["image_token_id"] < miniature.tokens.start < small["text_config"]["vocab_size"] < 300
    assert (small["vision_config"]["depth"], small["vision_config"]["fullatt_block_indexes"]) == (3, [2])

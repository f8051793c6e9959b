"""Layers of Transformers that the kernels compute as a whole, one by one or as a stack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from quire.kernels.interrupt import Interrupt, StepInterrupted
from quire.shared.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.models import transformers_backend
from quire.worker.models import transformers_trial as trial
from quire.worker.models.transformers_backend import TransformersModel
from quire.worker.models.transformers_fused_layer import FusedLayer, fuse_layers
from quire.worker.models.transformers_fused_stack import StackedLayer, StackedNorm
from tests.support.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE
from tests.support.parity import load
from tests.support.transformers_checkpoints import LLAMA_LIKE, make_kind, make_other

pytestmark = pytest.mark.slow

TEXTS = trial.texts(VOCAB_SIZE, 256)


@pytest.fixture
def without_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep single layers, which a stack would replace."""
    monkeypatch.setattr(transformers_backend, "fuse_stack", lambda *_: False)


def fused_layers(model: transformers_backend.TransformersModel) -> list[FusedLayer]:
    found = (vars(layer).get("forward") for layer in model._model.model.layers)
    return [one for one in found if isinstance(one, FusedLayer)]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "ministral"])
@pytest.mark.usefixtures("without_stacks")
def test_whole_layers_give_the_logits_of_single_modules(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_other(tmp_path / model_type, model_type, **(LLAMA_LIKE | {"head_dim": 16}))
    model = load(path)
    assert len(fused_layers(model)) == 3
    monkeypatch.setattr(transformers_backend, "fuse_layers", lambda *_: 0)
    plain = load(path)
    assert fused_layers(plain) == []
    found, expected = (trial.over_pages(one, TEXTS) for one in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("without_stacks")
def test_a_layer_that_computes_something_more_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaDecoderLayer.forward

    def scaled(self: Any, *args: Any, **named: Any) -> Any:
        return forward(self, *args, **named) * 1.01

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    model = load(make_kind(tmp_path / "llama", "llama-yarn"))
    assert fused_layers(model) == []
    assert "forward" not in vars(model._model.model.layers[0])


@pytest.mark.usefixtures("without_stacks")
def test_layers_that_fail_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_kind(tmp_path / "llama", "llama-yarn"))
    for layer in model._model.model.layers:
        del layer.forward
    monkeypatch.setattr(FusedLayer, "__call__", lambda *_, **__: 1 / 0)
    args = (model._model, model.ops, model._fused.rotations, lambda: trial.over_pages(model, TEXTS))
    assert fuse_layers(*args) == 0
    assert fused_layers(model) == []


FIELDS = LLAMA_LIKE | {"head_dim": 16}


def stacked(model: TransformersModel) -> list[Any]:
    """Return the forwards of layers and of the final norm that belong to a stack."""
    found = (vars(module).get("forward") for module in model._model.modules())
    return [one for one in found if isinstance(one, StackedLayer | StackedNorm)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),  # in some layers
        ("qwen3", {}),
    ],
)
def test_a_stack_gives_the_answers_of_single_layers(
    model_type: str, more: dict[str, Any], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_other(tmp_path / model_type, model_type, **(FIELDS | more))
    model = load(path, dtype=dtype)
    assert [type(one) for one in stacked(model)] == 3 * [StackedLayer] + [StackedNorm]
    monkeypatch.setattr(transformers_backend, "fuse_stack", lambda *_: False)
    plain = load(path, dtype=dtype)
    assert stacked(plain) == []
    found, expected = (trial.over_pages(one, TEXTS) for one in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 if dtype is torch.float32 else 0.05)
    if dtype is torch.float32:
        prompts = [tuple((37 * at + 11 * length) % 250 + 1 for at in range(length)) for length in (3, 40, 17, 64)]
        limits = EngineLimits(24, 8, 4, 32, 128)  # chunks, and too few blocks for all sequences
        greedy = SamplingParams(max_tokens=12, temperature=0.0)
        outputs = [generate(Engine(one, limits, (EOS_TOKEN_ID,), None), prompts, greedy) for one in (model, plain)]
        assert outputs[0] == outputs[1]


def test_two_caches_in_turns_do_not_mix(tmp_path: Path) -> None:
    model = load(make_other(tmp_path / "llama", "llama", **FIELDS))
    first, second = (trial.batch([trial.TrialChunk(0, 0, text)]) for text in TEXTS)
    caches = [model.alloc_kv_cache(1, trial.BLOCK_SIZE) for _ in range(2)]
    with torch.inference_mode():
        alone = [model.forward(batch, model.alloc_kv_cache(1, trial.BLOCK_SIZE)) for batch in (first, second)]
        for _ in range(2):
            for batch, cache, expected in zip((first, second), caches, alone, strict=True):
                assert torch.equal(model.forward(batch, cache), expected)
    keys = [cache.layers[0][0].float() for cache in caches]
    assert not torch.equal(*keys)


def test_embeddings_are_the_output_of_the_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_other(tmp_path / "llama", "llama", **FIELDS)
    model = load(path)
    monkeypatch.setattr(transformers_backend, "fuse_stack", lambda *_: False)
    for one in (model, load(path)):
        batch = replace(trial.batch([trial.TrialChunk(0, 0, TEXTS[0])]), pooled_rows=torch.arange(len(TEXTS[0])))
        with torch.inference_mode():
            pooled = one.forward_pooled(batch, one.alloc_kv_cache(1, trial.BLOCK_SIZE))[1]
        if one is model:
            expected = pooled.clone()
    torch.testing.assert_close(pooled, expected, rtol=1e-4, atol=1e-4)


def test_a_step_of_a_stack_can_be_interrupted(tmp_path: Path) -> None:
    model = load(make_other(tmp_path / "llama", "llama", **FIELDS))
    cache = model.alloc_kv_cache(2, trial.BLOCK_SIZE)
    interrupt = Interrupt()
    batch = replace(trial.batch([trial.TrialChunk(0, 0, TEXTS[0])]), interrupt=interrupt)
    with torch.inference_mode():
        expected = model.forward(batch, cache).clone()
        interrupt.request()
        with pytest.raises(StepInterrupted):
            model.forward(batch, cache)
        interrupt.clear()
        assert torch.equal(model.forward(batch, cache), expected)


@pytest.mark.parametrize("change", ["between", "rotations", "norm"])
def test_models_that_compute_more_keep_their_single_layers(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_other(tmp_path / "llama", "llama", **FIELDS)
    forward = FusedLayer.__call__
    if change == "between":  # another tensor goes to the next layer
        monkeypatch.setattr(FusedLayer, "__call__", lambda self, x, **more: forward(self, x * 1.0, **more).clone())
        original = LlamaModel.forward

        def scaled(self: Any, *args: Any, **more: Any) -> Any:
            hooks = [layer.register_forward_pre_hook(lambda _, given: (given[0] * 1.5,)) for layer in self.layers[1:]]
            found = original(self, *args, **more)
            for hook in hooks:
                hook.remove()
            return found

        monkeypatch.setattr(LlamaModel, "forward", scaled)
    elif change == "rotations":  # the second layer gets rotations of its own
        original = LlamaModel.forward

        def turned(self: Any, *args: Any, **more: Any) -> Any:
            def other(_: Any, given: Any, named: dict[str, Any]) -> Any:
                cos, sin = named["position_embeddings"]
                return given, named | {"position_embeddings": (cos.clone(), sin.clone())}

            hook = self.layers[1].register_forward_pre_hook(other, with_kwargs=True)
            found = original(self, *args, **more)
            hook.remove()
            return found

        monkeypatch.setattr(LlamaModel, "forward", turned)
    else:  # two norms take the output of the last layer, or none does
        original = LlamaModel.forward

        def copied(self: Any, *args: Any, **more: Any) -> Any:
            hook = self.norm.register_forward_pre_hook(lambda _, given: (given[0].clone(),))
            found = original(self, *args, **more)
            hook.remove()
            return found

        monkeypatch.setattr(LlamaModel, "forward", copied)
    model = load(path)
    assert stacked(model) == []
    found = (vars(module).get("forward") for module in model._model.modules())
    assert sum(isinstance(one, FusedLayer) for one in found) == 3


def test_layers_with_attention_of_several_kinds_are_no_stack(tmp_path: Path) -> None:
    """Every second layer of Cohere 2 and others has no rotations, so that it is no fused layer."""
    model = load(make_other(tmp_path / "smollm3", "smollm3", **(FIELDS | {"no_rope_layers": [1, 0, 1]})))
    assert stacked(model) == []

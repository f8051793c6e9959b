"""Adapters of each kind that PEFT writes: one batch of all of them has the answers that PEFT computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.shared.protocol.messages import GenerationRequest
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.models.native.decoder import Decoder
from tests.support.adapters import load_adapted, load_base, write_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.parity import GREEDY, assert_greedy, prompts

KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "embedding": {"targets": ["q_proj", "embed_tokens"]},
    "head": {"targets": ["q_proj", "lm_head"]},
    "tied ends": {"targets": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "tied head": {"targets": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "dora ends": {"targets": ["q_proj", "down_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "saved": {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "saved norms": {"targets": ["q_proj"], "modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
    "saved embedding": {"targets": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved tied": {"targets": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "tokens": {"targets": ["q_proj"], "trainable_token_indices": list(range(9, 60, 3))},
    "own tokens": {"targets": ["o_proj"], "trainable_token_indices": {"embed_tokens": [9, 7], "lm_head": [11]}},
    "lora bias": {"targets": ["q_proj", "down_proj"], "lora_bias": True},
    "biases": {"targets": ["k_proj", "o_proj"], "bias": "lora_only"},
    "dora biases": {"targets": ["q_proj", "up_proj"], "bias": "all", "use_dora": True},
}


def answers(base: Path, adapters: dict[str, Path], prefer: str = "auto", bits: int = 0) -> list[list[int]]:
    """Return the greedy answers to the first prompts, the first without an adapter, the others with one each."""
    model = Decoder.load(base, kernels.select_ops("cpu", torch.float32, prefer), torch.float32, "cpu", bits=bits)
    engine = Engine(model, EngineLimits(200, 8, 20, 64, model.max_model_len), model.config.eos_token_ids, None)
    engine.adapters.limit = len(adapters)
    for number, (name, text) in enumerate(zip(["", *adapters], prompts(), strict=False)):
        if name:
            engine.adapters.add(model.load_adapter(name, adapters[name], 64))
        engine.add(GenerationRequest(str(number), "m", text, GREEDY, adapter=name))
    found: list[list[int]] = [[] for _ in range(1 + len(adapters))]
    while engine.has_work:
        for item in engine.step():
            for delta in item.deltas:
                found[int(item.request_id)].extend(delta.token_ids)
    return found


@pytest.fixture(
    scope="module",
    params=[
        "qwen3",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("llama-bias", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.soak),
    ],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kinds") / request.param, request.param)


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return {
        name: write_adapter(base.parent / name, base, seed=seed, size=1.0, **fields)
        for seed, (name, fields) in enumerate(KINDS.items())
    }


@pytest.mark.parametrize("prefer", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_batch_of_all_kinds_has_the_answers_of_peft(base: Path, adapters: dict[str, Path], prefer: str) -> None:
    found = answers(base, adapters, prefer)
    plain = load_base(base)
    assert_greedy(plain, prompts()[:1], found[:1])
    for text, answer, path in zip(prompts()[1:], found[1:], adapters.values(), strict=False):
        assert_greedy(load_adapted(base, path), [text], [answer])


@pytest.mark.slow
def test_base_weights_are_those_that_peft_stored_next_to_the_factors(base: Path, adapters: dict[str, Path]) -> None:
    """PEFT stores the tables that factors change, too; equal ones take no memory."""
    model = Decoder.load(base, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")
    table = model.vocab_size * model.hidden_size * 4
    assert model.load_adapter("a", adapters["tied ends"], 64).nbytes < table
    assert model.load_adapter("a", adapters["saved"], 64).nbytes > 2 * table

"""DeepSeek-V3.2 and its kin are served in contexts that their indexers select as a whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.shared.messages import SamplingParams
from quire.worker.engine.offline import generate
from quire.worker.models.sparse_attention import compressed_keys
from quire.worker.models.transformers_attention import AttentionProbe, UnsupportedAttention
from tests.support.architectures import ARCHITECTURES
from tests.support.parity import MAX_TOKENS, assert_greedy, load, load_reference, make_engine, prompts, refusal
from tests.support.transformers_checkpoints import make_other

pytestmark = pytest.mark.usefixtures("one_thread")


def make(folder: Path, kind: str, **changes: Any) -> Path:
    model_type, fields = ARCHITECTURES[kind]
    return make_other(folder / kind, model_type, **(fields | changes))


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_contexts_up_to_the_selected_number_are_served(kind: str, tmp_path: Path) -> None:
    path = make(tmp_path, kind, index_topk=128)
    model = load(path, 128)
    assert all(shape.latent is not None for shape in model._shapes)
    engine = make_engine(model, num_host_blocks=200, preemption="swap")
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=2)
    outputs = generate(engine, prompts(), params)
    assert engine.groups.counters.swapped > 0
    assert_greedy(load_reference(path), prompts(), [choices[0] for choices in outputs])
    assert all(choices == choices[:1] * 2 for choices in outputs)


def test_longer_contexts_are_refused_with_the_number(tmp_path: Path) -> None:
    said = refusal(make(tmp_path, "deepseek_v32", index_topk=128), 129)
    assert "its attention takes indices" in said
    assert said.endswith("give --max-model-len 128, the number of tokens that its index selects, or less")


def test_compressed_keys_are_refused_by_name(tmp_path: Path) -> None:
    said = refusal(make(tmp_path, "deepseek_v4"), 64)
    assert "attend to compressed keys, one for several tokens (layer_types heavily_compressed_attention)" in said
    assert "see docs/quickstart.md" in said
    both = ["full_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    assert "compressed_sparse_attention, heavily" in compressed_keys(SimpleNamespace(layer_types=both))
    assert compressed_keys(SimpleNamespace(layer_types=None)) == compressed_keys(SimpleNamespace()) == ""


def test_indices_of_keys_are_not_taken_for_none() -> None:
    parts = [torch.zeros(1, 4, 2, 16) for _ in range(3)]
    call = {"module": object(), "attention_mask": torch.zeros(1, 1, 2, 2)}
    AttentionProbe(torch.float32, 64).attend(q=parts[0], k=parts[1], v=parts[2], indices=torch.zeros(0), **call)
    with pytest.raises(UnsupportedAttention, match="its attention takes indices"):
        AttentionProbe(torch.float32, 64).attend(q=parts[0], k=parts[1], v=parts[2], indices=torch.zeros(1), **call)

"""The text of vision-language models that Transformers computes: parity, and memory without the towers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quire.worker.engine.offline import generate
from tests.support.selection import one_in
from tests.support.served_models import NUM_STATE_SLOTS, reference
from tests.support.teacher_forcing import assert_greedy
from tests.support.transformers_checkpoints import make_kind
from tests.support.transformers_models import load
from tests.support.vision_checkpoints import OTHERS, OWN, make_vision
from tests.worker.engine.test_engine_parity import prompts
from tests.worker.models.test_transformers_parity import GREEDY, make_engine

KINDS = [*OTHERS, "qwen2_5_vl", "qwen3_vl", "mistral3"]
PUBLISHED = ("qwen3_5", "llama4")  # their types have another class for text alone

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PUBLISHED, *one_in(3, [kind for kind in KINDS if kind not in PUBLISHED])])
def test_greedy_outputs_equal_those_of_hugging_face(kind: str, tmp_path: Path) -> None:
    path = make_vision(tmp_path / kind, kind)
    model = load(path)
    slots = {"num_state_slots": NUM_STATE_SLOTS} if model.state_bytes else {}
    engine = make_engine(model, prefix_caching=True, **slots)
    found = [choices[0] for choices in generate(engine, prompts(), GREEDY)]
    assert engine.groups.num_preemptions > 0
    assert_greedy(reference(path), prompts(), found)
    hits = engine.scheduler.blocks.counters.prefix_hits
    assert [choices[0] for choices in generate(engine, prompts()[-2:] * 2, GREEDY)] == found[-2:] * 2
    assert engine.scheduler.blocks.counters.prefix_hits > hits


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_in(3, [*OTHERS, *OWN]))
def test_towers_are_not_kept_in_memory(kind: str, tmp_path: Path) -> None:
    model = load(make_vision(tmp_path / kind, kind))._model
    names = [name for name, _ in model.named_parameters()]
    assert names
    assert not [name for name in names if re.search("vis|projector|connector|audio|vqmodel", name)]


def test_a_model_of_text_alone_keeps_all_of_its_parts(tmp_path: Path) -> None:
    model: Any = load(make_kind(tmp_path / "gpt2", "gpt2"))._model
    assert None not in model._modules.values()
    assert None not in model.transformer._modules.values()

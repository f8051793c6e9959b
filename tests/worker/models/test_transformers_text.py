"""The text of vision-language models that Transformers computes: parity, and memory without the towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.worker.engine.offline import generate
from tests.support.teacher_forcing import assert_greedy, load_reference
from tests.support.transformers_checkpoints import make_kind
from tests.support.transformers_models import load
from tests.support.vision_checkpoints import OTHERS, OWN, make_vision
from tests.worker.engine.test_engine_parity import prompts
from tests.worker.models.test_transformers_parity import GREEDY, make_engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*OTHERS, "qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_greedy_outputs_equal_those_of_hugging_face(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    path = make_vision(tmp_path / kind, kind)
    engine = make_engine(load(path), prefix_caching=True)
    found = [choices[0] for choices in generate(engine, prompts(), GREEDY)]
    assert engine.groups.num_preemptions > 0
    assert_greedy(load_reference(path, AutoModelForImageTextToText), prompts(), found)
    hits = engine.scheduler.blocks.counters.prefix_hits
    assert [choices[0] for choices in generate(engine, prompts()[-2:] * 2, GREEDY)] == found[-2:] * 2
    assert engine.scheduler.blocks.counters.prefix_hits > hits


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*OTHERS, *OWN])
def test_towers_are_not_kept_in_memory(kind: str, tmp_path: Path) -> None:
    model = load(make_vision(tmp_path / kind, kind))._model
    names = [name for name, _ in model.named_parameters()]
    assert names
    assert not [name for name in names if "vis" in name or "projector" in name or "connector" in name]


def test_a_model_of_text_alone_keeps_all_of_its_parts(tmp_path: Path) -> None:
    model: Any = load(make_kind(tmp_path / "gpt2", "gpt2"))._model
    assert None not in model._modules.values()
    assert None not in model.transformer._modules.values()

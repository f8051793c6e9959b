"""The text of vision-language models that Transformers computes: parity, and memory without the towers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import load
from tests.support.selection import one_in
from tests.support.transformers_checkpoints import make_kind
from tests.support.vision_checkpoints import OTHERS, OWN, make_vision

pytestmark = pytest.mark.usefixtures("one_thread")


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

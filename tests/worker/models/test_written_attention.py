"""Models whose attention Transformers writes out give the same tokens with paged attention as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.worker.engine.offline import generate
from quire.worker.models import transformers_trial as trial
from quire.worker.models.errors import NotSupported
from quire.worker.models.transformers_backend import TransformersModel
from quire.worker.models.transformers_config import read_transformers_config
from quire.worker.models.transformers_linear import PackedLinearModule
from tests.support.parity import GREEDY, MAX_TOKENS, assert_greedy, load, make_engine, refusal
from tests.support.served_models import reference
from tests.support.transformers_checkpoints import make_other
from tests.support.written_checkpoints import WRITTEN

pytestmark = pytest.mark.usefixtures("one_thread")


def make(folder: Path, kind: str, **fields: Any) -> Path:
    return make_other(folder / kind, WRITTEN[kind][0], **(WRITTEN[kind][1] | fields))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon-alibi"])
def test_biases_of_distant_keys_are_exact(kind: str, tmp_path: Path) -> None:
    """Biases grow to more than 1000, and scores differ by fractions of 1."""
    context = {"bloom": "seq_length", "mpt": "max_seq_len", "falcon-alibi": "max_position_embeddings"}[kind]
    path = make(tmp_path, kind, **{context: 2048})
    prompt = tuple((7 * at * at + 3) % 250 for at in range(2048 - MAX_TOKENS))
    engine = make_engine(load(path), num_blocks=300, max_num_batched_tokens=512)
    assert_greedy(reference(path), [prompt], generate(engine, [prompt], GREEDY)[0])


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon-alibi", "gptj"])
def test_activations_of_16_bits_give_logits_near_the_exact_ones(kind: str, tmp_path: Path) -> None:
    path = make(tmp_path, kind)
    texts = [torch.arange(3, 14, dtype=torch.int32), torch.arange(40, 46, dtype=torch.int32)]
    expected = trial.by_transformers(reference(path), texts)
    assert float((trial.over_pages(load(path), texts) - expected).abs().max()) < 1e-4
    rough = trial.over_pages(load(path, dtype=torch.bfloat16), texts)
    assert 0 < float((rough - expected).norm() / expected.norm()) < 0.05


def test_linear_layers_of_all_families_are_packed(tmp_path: Path) -> None:
    for kind in ("falcon", "bloom", "codegen"):
        model = load(make(tmp_path, kind))
        assert sum(isinstance(one, PackedLinearModule) for one in model._model.modules()) == 3 * 4 + 1
        assert model.is_row_invariant


def test_embeddings_are_the_hidden_states(tmp_path: Path) -> None:
    assert load(make(tmp_path, "bloom")).hidden_size == 64


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_caches_of_8_bits_are_refused_for_alibi(dtype: torch.dtype, tmp_path: Path) -> None:
    ops = kernels.select_ops("cpu", torch.float32, kv_dtype=dtype)
    config = read_transformers_config(make(tmp_path, "bloom"))
    with pytest.raises(NotSupported, match=r"\(ALiBi\), which a cache of 8 bits .* give --kv-cache-dtype auto"):
        TransformersModel.load(config, ops, "cpu")
    assert TransformersModel.load(read_transformers_config(make(tmp_path, "gptj")), ops, "cpu")


@pytest.mark.parametrize(("field", "value"), [("qk_ln", True), ("alibi", False), ("attn_type", "multiquery_attention")])
def test_fields_of_mpt_that_transformers_ignores_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    said = refusal(make(tmp_path, "mpt", attn_config={field: value}))
    assert f"{field} of its attn_config is {value!r}" in said


def test_the_context_of_bloom_is_that_of_its_training_if_it_says_none(tmp_path: Path) -> None:
    assert read_transformers_config(make(tmp_path, "bloom")).max_position_embeddings == 256
    fields = {key: value for key, value in WRITTEN["bloom"][1].items() if key != "seq_length"}
    path = make_other(tmp_path / "plain", "bloom", **fields)
    assert read_transformers_config(path).max_position_embeddings == 2048

"""Two workers have equal digests if and only if they compute alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.ops.paths import PROJECT_ROOT
from quire.worker.build import build_engine
from quire.worker.inspect.fingerprint import of_results, of_weights
from quire.worker.models.native import decoder
from quire.worker.models.native.rope import RopeConfig
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.transformers_checkpoints import make_kind


def digests(folder: Path, **settings: object) -> tuple[str, str]:
    """Return the digest of the weights and the digest of the results."""
    chosen = WorkerSettings(model=str(folder), device="cpu", num_blocks=64, **settings)  # type: ignore[arg-type]
    engine = build_engine(chosen, "test")
    before = engine.scheduler.blocks.known()
    results = of_results(engine)
    assert engine.scheduler.blocks.known() == before, "nothing of it may stay in the cache"
    return engine.runner.model.weights_digest, results


pytestmark = pytest.mark.usefixtures("thread_counts")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def test_equal_workers_have_equal_digests_whatever_their_threads_and_memory(llama: Path) -> None:
    one = digests(llama, threads=1)
    assert all(len(digest) == 8 for digest in one)
    assert digests(llama, threads=2, block_size=8, max_num_seqs=3) == one


def test_another_type_of_numbers_gives_other_results_of_the_same_weights(llama: Path) -> None:
    weights, results = digests(llama, dtype="float32")
    others = digests(llama, dtype="bfloat16")
    assert others[0] == weights
    assert others[1] != results


def test_other_weights_are_seen_in_both(llama: Path, tmp_path: Path) -> None:
    weights, results = digests(llama)
    others = digests(make_checkpoint(tmp_path, "llama", seed=1))
    assert others[0] != weights
    assert others[1] != results


def test_a_table_that_came_out_otherwise_is_seen(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest covers the whole table, far beyond the positions of the few computed tokens."""
    weights, results = digests(llama)
    make = decoder.cos_sin_table

    def inexact(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
        table = make(rope, head_dim, num_positions)
        table[-1, 0] += 1e-6
        return table

    monkeypatch.setattr(decoder, "cos_sin_table", inexact)
    assert digests(llama)[0] == weights
    assert digests(llama)[1] != results


def test_the_digest_of_weights_does_not_depend_on_the_files_that_hold_them(llama: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert of_weights(tmp_path) == of_weights(llama)
    model.model.layers[1].mlp.down_proj.weight.data[32, 5] += 1e-3
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert of_weights(tmp_path) != of_weights(llama)


def test_where_equal_workers_may_differ_no_results_are_compared(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert digests(llama)[1]
    monkeypatch.setattr(kernels.CpuOps, "row_invariant", False)
    assert digests(llama)[1] == ""
    assert digests(llama)[0] == of_weights(llama)


def test_a_context_that_is_too_short_has_no_results(llama: Path) -> None:
    assert digests(llama, max_model_len=2)[1] == ""
    assert digests(llama, max_model_len=3)[1] != ""


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("kind", ["gemma3", "gpt2", pytest.param("olmo2", marks=pytest.mark.soak)])
def test_tables_of_any_shape_are_counted_in(kind: str, tmp_path: Path) -> None:
    folder = make_kind(tmp_path, kind)
    weights, results = digests(folder)
    assert len(weights) == len(results) == 8
    assert digests(folder) == (weights, results)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.slow
def test_models_of_transformers_have_both(tmp_path: Path) -> None:
    weights, results = digests(PROJECT_ROOT / "models/demo", model_impl="transformers")
    assert (weights, results) == digests(PROJECT_ROOT / "models/demo", model_impl="transformers")
    own = digests(PROJECT_ROOT / "models/demo")
    assert own[0] == weights
    assert results
    assert own[1] != results, "the table of one, and not of the other, is kept"

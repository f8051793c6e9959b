"""Engines over checkpoints whose blocks spill: caches of every type and shape, fingerprints, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.shared.process.errors import StartError
from quire.shared.protocol.messages import SamplingParams
from quire.worker import build
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.spill import fingerprint, start
from quire.worker.engine.features.spill.block_spill import BlockSpill
from quire.worker.engine.offline import generate
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.hybrid_checkpoints import make_hybrid
from tests.support.spills import settle
from tests.support.transformers_checkpoints import make_kind

PROMPT = tuple((7 * at + 3) % 200 for at in range(97))
OTHERS = [tuple((11 * at + number) % 200 for at in range(100)) for number in (1, 2, 3)]
LATENT = "deepseek-v3"  # a latent cache
ANSWER = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are so small that computing a block takes less time than reading it."""
    monkeypatch.setattr(start, "measure_read", lambda file, pool: 0.0)
    monkeypatch.setattr(start, "measure_compute", lambda engine: 10.0)


def checkpoint(folder: Path, family: str) -> Path:
    path = folder / family
    return path if path.exists() else (make_kind if family == LATENT else make_checkpoint)(path, family)


def make(model: Path, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "num_blocks": 16, "max_num_seqs": 2, "threads": 1}
    return build.build_engine(
        WorkerSettings(model=str(model), **sizes | {"device": "cpu", "dtype": "float32"} | options), "m"
    )


def spill_of(engine: Engine) -> BlockSpill:
    spill = engine.scheduler.spill
    assert isinstance(spill, BlockSpill)
    return spill


def answer(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    [[tokens]] = generate(engine, [prompt], ANSWER)
    if engine.scheduler.spill is not None:
        engine.prepare()
        settle(spill_of(engine))
    return tokens


def hits(engine: Engine, prompt: tuple[int, ...]) -> tuple[list[int], int]:
    """Return the answer, and how many tokens of the prompt were cached."""
    before = engine.groups.blocks.counters.prefix_hits
    return answer(engine, prompt), engine.groups.blocks.counters.prefix_hits - before


@pytest.mark.usefixtures("reading_pays")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"kv_cache_dtype": "bfloat16"}),
        ("llama", {"kv_cache_dtype": "int8"}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("llama", {"kernels": "reference"}),
        ("llama", {"model_impl": "transformers"}),
        ("llama", {"quantization": "int8", "block_size": 16, "num_blocks": 8}),
        ("gemma3", {}),
        ("gemma4", {}),
        (LATENT, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_answers_on_blocks_of_another_process_are_those_of_an_engine_without_a_spill(
    family: str, options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    path = checkpoint(folder, family)
    plain = make(path, **options)
    expected, length = answer(plain, PROMPT), len(PROMPT) // plain.limits.block_size * plain.limits.block_size
    spilling = {"kv_spill_dir": str(tmp_path), "kv_spill_gb": 0.02} | options
    first = make(path, **spilling)
    assert answer(first, PROMPT) == expected
    for other in OTHERS:
        answer(first, other)
    assert hits(first, PROMPT) == (expected, length)
    assert spill_of(first).figures().read["disk"] > 0
    first.close()
    second = make(path, **spilling)
    assert hits(second, PROMPT) == (expected, length)
    assert second.num_prefill_tokens < len(PROMPT) * 4, "the prompt was not computed again"
    second.close()


@pytest.mark.usefixtures("reading_pays")
def test_a_file_of_another_revision_type_size_or_level_is_not_used(folder: Path, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    spilling = {"kv_spill_dir": str(tmp_path / "spill"), "kv_spill_gb": 0.02}

    def used(**options: Any) -> int:
        engine = make(path, **spilling | options)
        try:
            return hits(engine, PROMPT)[1]
        finally:
            engine.close()

    assert used() == 0
    assert used() == 96
    assert used(kv_cache_dtype="bfloat16") == 0
    assert used() == 0
    assert used(block_size=16, num_blocks=8) == 0
    assert used() == 0
    assert used(kernels="reference") == 0
    assert used() == 0
    assert used(quantization="int8") == 0
    assert used() == 0
    # One number of one weight that no short text touches: the row of a token that is in no prompt.
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][250, 3] += 1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert used() == 0
    assert used() == 96
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.1e-5}))
    assert used() == 0


def test_another_version_of_a_library_or_of_the_code_is_another_fingerprint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, limits = checkpoint(folder, "llama"), make(checkpoint(folder, "llama")).limits
    first = fingerprint.fingerprint_of({"kernels": "a"}, path, limits, 100)
    assert first == fingerprint.fingerprint_of({"kernels": "a"}, path, limits, 100)
    assert first != fingerprint.fingerprint_of({"kernels": "b"}, path, limits, 100)
    assert first != fingerprint.fingerprint_of({"kernels": "a"}, path, limits, 101)
    monkeypatch.setattr(fingerprint, "version", lambda name: f"other {name}")
    assert first != fingerprint.fingerprint_of({"kernels": "a"}, path, limits, 100)
    monkeypatch.undo()
    monkeypatch.setattr(fingerprint, "SOURCE_SUFFIXES", (".h",))
    assert first != fingerprint.fingerprint_of({"kernels": "a"}, path, limits, 100)


def test_every_part_of_a_split_model_counts(folder: Path, tmp_path: Path) -> None:
    limits = make(checkpoint(folder, "llama")).limits
    one, two = parts = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    first = fingerprint.fingerprint_of({}, one, limits, 100)
    two.write_bytes(b"other weights")
    assert first != fingerprint.fingerprint_of({}, one, limits, 100)


@pytest.mark.usefixtures("reading_pays")
def test_host_memory_alone_keeps_evicted_blocks(folder: Path) -> None:
    path = checkpoint(folder, "llama")
    engine, plain = make(path, kv_host_gb=0.01), make(path)
    for prompt in (PROMPT, *OTHERS, PROMPT):
        before = engine.groups.blocks.counters.prefix_hits
        assert generate(engine, [prompt], ANSWER) == generate(plain, [prompt], ANSWER)
    assert engine.groups.blocks.counters.prefix_hits - before == 96
    figures = spill_of(engine).figures()
    assert figures.read["host"] > 0
    assert figures.kept["disk"] == figures.blocks["disk"] == 0
    engine.close()


def test_the_worker_writes_the_time_of_both_ways_to_its_log(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        make(checkpoint(folder, "llama"), kv_spill_dir=str(tmp_path), kv_spill_gb=0.01).close()
    [line] = [record.message for record in caplog.records if "reading a block takes" in record.message]
    assert "0 of " in line, "the blocks of the measurement are gone"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_caching": False}, "--kv-spill-dir .*: only blocks of the prefix cache are kept; take --prefix-cach"),
        ({"tensor_parallel_size": 2}, "each of 2 ranks has a part of every block; take --tensor-parallel-size 1"),
        ({"kv_spill_gb": 0.00001}, "--kv-spill-gb 1e-05 is too small for one block of .* raise it"),
        ({"kv_host_gb": 60_000.0}, "--kv-host-gb 60000: .* GiB are free; lower it"),
    ],
)
def test_settings_without_effect_are_refused_with_a_remedy(
    options: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match=message):
        make(checkpoint(folder, "llama"), kv_spill_dir=str(tmp_path), **options)


def test_a_model_with_recurrent_states_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = make_hybrid(tmp_path / "model", "lfm2")
    with pytest.raises(StartError, match="--kv-host-gb 1: the model keeps recurrent states"):
        make(path, kv_host_gb=1.0, snapshot_tokens=256)


def test_without_the_settings_the_engine_has_no_spill(folder: Path) -> None:
    engine = make(checkpoint(folder, "llama"))
    assert engine.scheduler.spill is None
    assert engine.runner.spill is None
    assert type(engine.groups.blocks).__name__ == "BlockManager"

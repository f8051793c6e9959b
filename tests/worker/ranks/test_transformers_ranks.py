"""Models that Transformers computes on several ranks give the tokens of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.shared.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.models.transformers_config import read_transformers_config
from quire.worker.ranks.leader import Followers, LeadingTransformersModel
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import EOS_TOKEN_ID, make_checkpoint
from tests.support.hybrid_checkpoints import make_hybrid
from tests.support.parity import MAX_TOKENS, by_hugging_face, load, prompts
from tests.support.quantized import quantize_checkpoint
from tests.support.selection import one_in
from tests.support.transformers_checkpoints import make_kind
from tests.worker.engine.test_pooling import by_engine, vectors

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def ranks_of(path: Path, size: int = 2, prefer: str = "auto") -> Iterator[LeadingTransformersModel]:
    """A model over `size` real processes, this one among them."""
    ops = kernels.select_ops("cpu", torch.float32, prefer)
    settings = WorkerSettings(
        model=str(path), tensor_parallel_size=size, kernels=prefer, threads=1, model_impl="transformers"
    )
    deaths: list[tuple[int, int, str]] = []
    followers = Followers(settings, path, ops, lambda *death: deaths.append(death))
    try:
        yield LeadingTransformersModel.lead(followers, read_transformers_config(path), ops, "cpu")
    finally:
        followers.close()
    assert deaths == []


def answers(model: LeadingTransformersModel, preemption: str) -> list[tuple[int, ...]]:
    limits = EngineLimits(
        num_blocks=40,
        num_host_blocks=60,
        block_size=8,
        max_num_seqs=12,
        max_num_batched_tokens=32,
        max_model_len=model.max_model_len,
        preemption=preemption,
    )
    engine = Engine(model, limits, model.config.eos_token_ids, None)
    outputs = generate(engine, prompts(), SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
    assert engine.groups.num_preemptions > 0
    return [choices[0] for choices in outputs]


def make(folder: Path, kind: str) -> Path:
    return make_checkpoint(folder, "llama") if kind == "llama" else make_kind(folder / kind, kind)


# All take minutes together, so CI runs two of each kind.
IN_CI = ["gpt2", "qwen3-moe"]
OTHERS = ["llama", "opt", "gemma", "phi", "mixtral", "cohere2", "olmo2", "gpt-neox", "granite"]


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in IN_CI),
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in OTHERS),
    ],
)
def test_greedy_outputs_equal_those_of_hugging_face(kind: str, tmp_path: Path) -> None:
    path = make(tmp_path, kind)
    with ranks_of(path) as model:
        assert answers(model, "swap") == by_hugging_face(path)


@pytest.mark.parametrize(
    ("kind", "size", "prefer"),
    [
        # gloo, and a head whose vocabulary does not divide
        pytest.param("gpt2", 2, "reference", marks=pytest.mark.soak),
        pytest.param("llama", 4, "auto", marks=pytest.mark.slow),  # two ranks per kv head
        pytest.param("gpt-bigcode", 2, "auto", marks=pytest.mark.soak),  # one kv head
        pytest.param("diffllama", 2, "auto", marks=pytest.mark.soak),  # attention that is gathered
        pytest.param("deepseek-v3", 2, "auto", marks=pytest.mark.slow),  # values are narrower than keys
        pytest.param("gpt-oss", 2, "auto", marks=pytest.mark.soak),  # sinks; experts in pairs, with biases
        pytest.param("gemma4-global-heads", 2, "auto", marks=pytest.mark.soak),  # caches of two shapes
        pytest.param("mimo-v2", 2, "auto", marks=pytest.mark.soak),
    ],
)
def test_other_kinds_of_layers_and_ranks_equal_hugging_face(kind: str, size: int, prefer: str, tmp_path: Path) -> None:
    path = make(tmp_path, kind)
    with ranks_of(path, size, prefer) as model:
        assert answers(model, "swap") == by_hugging_face(path)


@pytest.mark.slow
def test_embeddings_are_those_of_one_process(tmp_path: Path) -> None:
    path = make(tmp_path, "gpt2")
    alone = load(path)
    with ranks_of(path) as model:
        found, expected = (vectors(by_engine(one, "mean", budget=50)) for one in (model, alone))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-4


@pytest.mark.parametrize("preemption", one_in(2, ["swap", "recompute"]))
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3-next", marks=pytest.mark.slow),
        *(
            pytest.param(family, marks=pytest.mark.soak)
            for family in ("lfm2", "nemotron-h", "kimi-linear", "falcon-h1", "bamba", "minimax", "zamba2", "jamba")
        ),
    ],
)
def test_models_with_recurrent_states_equal_one_process(family: str, preemption: str, tmp_path: Path) -> None:
    """Each rank has whole states. They are forked, swapped, and found in the prefix cache."""
    path = make_hybrid(tmp_path / family, family)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=2)
    alone = EngineLimits(600, 8, 12, 32, 256, num_state_slots=300, prefix_caching=False)
    wanted = generate(Engine(load(path), alone, (EOS_TOKEN_ID,), None), prompts(), params)
    with ranks_of(path) as model:
        small = EngineLimits(40, 8, 12, 32, 256, 60, num_state_slots=60, snapshot_interval=16, preemption=preemption)
        engine = Engine(model, small, model.config.eos_token_ids, None)
        assert generate(engine, prompts(), params) == wanted
        assert engine.groups.num_preemptions > 0
        roomy = EngineLimits(600, 8, 12, 32, 256, num_state_slots=300, snapshot_interval=16)
        engine = Engine(model, roomy, model.config.eos_token_ids, None)
        for _ in range(2):
            assert generate(engine, prompts(), params) == wanted
        assert engine.groups.blocks.counters.prefix_hits > 0


@pytest.mark.slow
def test_a_quantised_checkpoint_gives_the_tokens_of_its_numbers(tmp_path: Path) -> None:
    """Split layers have numbers instead of codes: a part of a layer is no layer of the checkpoint."""
    path = quantize_checkpoint(make_kind(tmp_path / "plain", "qwen3-moe"), tmp_path / "fp8", "fp8-block")
    with ranks_of(path) as model:
        assert answers(model, "swap") == by_hugging_face(path / "plain")

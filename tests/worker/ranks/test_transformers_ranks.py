"""Models that Transformers computes on several ranks give the tokens of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.shared.protocol.messages import SamplingParams
from quire.worker.device.cuda import record_on_cuda
from quire.worker.engine.offline import generate
from quire.worker.models.transformers.config import read_transformers_config
from quire.worker.ranks.leader import Followers, LeadingTransformersModel
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.hybrid_checkpoints import make_hybrid
from tests.support.parity import (
    GREEDY,
    MAX_TOKENS,
    assert_greedy,
    load,
    make_engine,
    prompts,
    reference,
)
from tests.support.quantized import quantize_checkpoint
from tests.support.selection import one_in
from tests.support.transformers_checkpoints import make_kind
from tests.worker.engine.features.test_pooling import by_engine, vectors

ASKED = prompts()[:12]


@contextmanager
def ranks_of(path: Path, size: int = 2, prefer: str = "auto") -> Iterator[LeadingTransformersModel]:
    """A model over `size` real processes, this one among them."""
    ops = kernels.select_ops("cpu", torch.float32, prefer)
    settings = WorkerSettings(
        model=str(path), tensor_parallel_size=size, kernels=prefer, threads=1, model_impl="transformers"
    )
    deaths: list[tuple[int, int, str]] = []
    followers = Followers(settings, path, ops, record_on_cuda, lambda *death: deaths.append(death))
    try:
        yield LeadingTransformersModel.lead(followers, read_transformers_config(path), ops, "cpu")
    finally:
        followers.close()
    assert deaths == []


def answers(model: LeadingTransformersModel, preemption: str) -> list[tuple[int, ...]]:
    engine = make_engine(model, num_blocks=24, num_host_blocks=60, preemption=preemption)
    outputs = generate(engine, ASKED, GREEDY)
    assert engine.groups.num_preemptions > 0
    return [choices[0] for choices in outputs]


def make(folder: Path, kind: str) -> Path:
    return make_checkpoint(folder, "llama") if kind == "llama" else make_kind(folder / kind, kind)


@pytest.mark.slow
def test_tokens_and_embeddings_are_those_of_one_process(tmp_path: Path) -> None:
    path = make(tmp_path, "gpt2")
    alone = load(path)
    with ranks_of(path) as model:
        assert_greedy(reference(path), ASKED, answers(model, "swap"), tie=0.0)
        found, expected = (vectors(by_engine(one, "mean", budget=50)) for one in (model, alone))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-4


# CI has a model of each kind of layers in the tests above and below.
@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "size", "prefer"),
    [
        *((kind, 2, "auto") for kind in ("llama", "opt", "gemma", "phi", "mixtral", "qwen3-moe", "cohere2", "olmo2")),
        *((kind, 2, "auto") for kind in ("gpt-neox", "granite")),
        ("gpt2", 2, "reference"),  # gloo, and a head whose vocabulary does not divide
        ("llama", 4, "auto"),  # two ranks per kv head
        ("gpt-bigcode", 2, "auto"),  # one kv head
        ("diffllama", 2, "auto"),  # attention that is gathered
        ("deepseek-v3", 2, "auto"),  # values are narrower than keys
        ("gpt-oss", 2, "auto"),  # sinks; experts in pairs, with biases
        ("gemma4-global-heads", 2, "auto"),  # caches of two shapes
        ("mimo-v2", 2, "auto"),
    ],
)
def test_greedy_outputs_equal_those_of_hugging_face(kind: str, size: int, prefer: str, tmp_path: Path) -> None:
    path = make(tmp_path, kind)
    with ranks_of(path, size, prefer) as model:
        assert_greedy(reference(path), ASKED, answers(model, "swap"), tie=0.0)


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
    wanted = generate(make_engine(load(path), num_blocks=400, prefix_caching=False), ASKED, params)
    with ranks_of(path) as model:
        engine = make_engine(model, num_blocks=24, num_host_blocks=60, preemption=preemption)
        assert generate(engine, ASKED, params) == wanted
        assert engine.groups.num_preemptions > 0
        roomy = make_engine(model, num_blocks=400, num_state_slots=300)
        for _ in range(2):
            assert generate(roomy, ASKED, params) == wanted
        assert roomy.groups.blocks.counters.prefix_hits > 0


@pytest.mark.slow
def test_a_quantised_checkpoint_gives_the_tokens_of_its_numbers(tmp_path: Path) -> None:
    """Split layers have numbers instead of codes: a part of a layer is no layer of the checkpoint."""
    path = quantize_checkpoint(make_kind(tmp_path / "plain", "qwen3-moe"), tmp_path / "fp8", "fp8-block")
    with ranks_of(path) as model:
        assert_greedy(reference(path / "plain"), ASKED, answers(model, "swap"), tie=0.0)

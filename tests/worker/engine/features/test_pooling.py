"""The embedding of a prompt: exact with any chunks, batch, preemption and runner; and that of Transformers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import kernels
from quire.shared.protocol.messages import GenerationRequest, StepItem
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.pooling import add_rows
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.paged_model import PagedModel
from quire.worker.models.native.decoder import Decoder
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.mock_model import (
    START,
    MockModel,
    advance,
    continuation,
    hidden_state,
    make_engine,
    request,
    run,
    text,
)


def embed(name: str, prompt: Iterable[int], pooling: str, salt: str = "", model: str = "mock") -> GenerationRequest:
    asked = request(name, prompt, salt, max_tokens=1)
    return GenerationRequest(asked.id, model, asked.prompt, asked.sampling, salt, pooling=pooling)


def expected(prompt: Iterable[int], pooling: str) -> bytes:
    """Return the embedding that the mock model gives."""
    state, states = START, []
    for token in prompt:
        state = advance(state, token)
        states.append(hidden_state(state))
    rows = np.array(states)
    return (rows[-1] if pooling == "last" else rows.sum(axis=0) / len(rows)).astype("<f4").tobytes()


def embedding(items: list[StepItem], name: str) -> bytes:
    """Return the embedding in the only item of a request."""
    [item] = [item for item in items if item.request_id == name]
    assert (item.start, item.deltas) == (0, ())
    assert item.outcome is not None
    assert item.outcome.name == "stop"
    assert item.outcome.embedding is not None
    return item.outcome.embedding


def test_the_last_token_uses_cached_prefixes_and_the_mean_does_not() -> None:
    engine = make_engine(prefix_caching=True)
    model: Any = engine.runner.model
    prompt = tuple(range(5, 45))
    computed = {}
    for name, pooling in (("first", "last"), ("again", "last"), ("mean", "mean")):
        before = model.num_computed
        engine.add(embed(name, prompt, pooling))
        assert embedding(run(engine), name) == expected(prompt, pooling)
        computed[name] = model.num_computed - before
    assert computed == {"first": 40, "again": 1, "mean": 40}
    # An answer uses the blocks of an embedded prompt.
    before = model.num_computed
    engine.add(request("answer", (*prompt, 1), max_tokens=1))
    assert text(run(engine), "answer") == continuation((*prompt, 1), 1)
    assert model.num_computed - before == 1


def test_a_prompt_may_fill_the_whole_context() -> None:
    engine = make_engine(max_model_len=40)
    engine.add(embed("whole", range(40), "last"))
    assert embedding(run(engine), "whole") == expected(range(40), "last")
    with pytest.raises(RequestRefused, match="41 prompt tokens exceed the context of 40"):
        engine.add(embed("more", range(41), "last"))


def test_a_model_without_hidden_states_refuses() -> None:
    model = MockModel()
    model.hidden_size = 0
    with pytest.raises(RequestRefused, match="no hidden states"):
        make_engine(model=model).add(embed("e", range(5), "last"))


def test_rows_are_added_in_their_order() -> None:
    rows = torch.randn(300, 8, generator=torch.Generator().manual_seed(1))
    whole = add_rows(None, rows)
    parts = None
    for part in torch.split(rows, 7):
        parts = add_rows(parts, part)
    assert whole.tobytes() == parts.tobytes()
    assert np.allclose(whole, rows.double().sum(dim=0).numpy(), atol=1e-12)


# --- real models ------------------------------------------------------------------------------------------------------

LENGTHS = (40, 7, 1, 120, 33)


def random_prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()) for length in LENGTHS]


def by_engine(model: PagedModel, pooling: str, budget: int, together: bool = True) -> list[bytes]:
    """Return the embeddings of the prompts, in steps of at most `budget` tokens, computed together or one by one."""
    limits = EngineLimits(60, 8, 8, budget, model.max_model_len, prefix_caching=False)
    engine = Engine(model, limits, (), None)
    engine.checks_itself = True
    items: list[StepItem] = []
    for index, prompt in enumerate(random_prompts()):
        engine.add(embed(str(index), prompt, pooling))
        if not together:
            items += run(engine)
    items += run(engine)
    return [embedding(items, str(index)) for index in range(len(LENGTHS))]


def by_transformers(path: Path, pooling: str, dtype: torch.dtype) -> list[torch.Tensor]:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0].float() for prompt in random_prompts()]
    return [state[-1] if pooling == "last" else state.mean(dim=0) for state in states]


def vectors(found: list[bytes]) -> list[torch.Tensor]:
    return [torch.frombuffer(bytearray(data), dtype=torch.float32) for data in found]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("prefer", ["auto", "reference"])
def test_embeddings_are_those_of_transformers(prefer: str, family: str, pooling: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family)
    model = Decoder.load(path, kernels.select_ops("cpu", torch.float32, prefer), torch.float32, "cpu")
    found = vectors(by_engine(model, pooling, budget=50))
    for one, other in zip(found, by_transformers(path, pooling, torch.float32), strict=True):
        assert (one - other).abs().max() < 1e-4


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_in_bfloat16_point_in_the_same_direction(pooling: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", initializer_range=0.1)
    model = Decoder.load(path, kernels.select_ops("cpu", torch.bfloat16), torch.bfloat16, "cpu")
    found = vectors(by_engine(model, pooling, budget=50))
    for one, other in zip(found, by_transformers(path, pooling, torch.float32), strict=True):
        assert torch.cosine_similarity(one, other, dim=0) > 0.999


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_bits_do_not_depend_on_batch_and_chunks(pooling: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Decoder.load(make_checkpoint(tmp_path, "llama"), kernels.select_ops("cpu", dtype), dtype, "cpu")
    alone = by_engine(model, pooling, budget=200, together=False)
    assert by_engine(model, pooling, budget=9) == alone
    assert by_engine(model, pooling, budget=64) == alone

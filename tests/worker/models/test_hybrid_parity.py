"""Models with recurrent states give the tokens of Hugging Face, whatever the engine does to a sequence."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.shared.messages import Delta, GenerationRequest, SamplingParams, StepItem
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.models.transformers_backend import TransformersModel
from quire.worker.models.transformers_config import read_transformers_config
from tests.support.checkpoints import EOS_TOKEN_ID
from tests.support.hybrid_checkpoints import FAMILIES, ONE_BY_ONE, make_hybrid
from tests.support.selection import one_in
from tests.support.transformers_models import load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

MAX_TOKENS = 16
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
LENGTHS = (1, 2, 8, 9, 40, 23, 17, 5, 64, 31)
# Chunks of at most 32 tokens, and too few blocks for all sequences.
SMALL = EngineLimits(26, 8, 8, 32, 256, 100, num_state_slots=24, snapshot_interval=16)


def prompts() -> list[tuple[int, ...]]:
    """Ten prompts, three of which begin alike."""
    found = [
        tuple((37 * index + 11 * at * at) % 250 + 1 for at in range(length)) for index, length in enumerate(LENGTHS)
    ]
    return [*found[:5], (*found[4][:20], *found[5]), (*found[4][:33], *found[6]), *found[7:]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


@lru_cache(maxsize=len(FAMILIES))
def loaded(folder: Path, family: str) -> tuple[TransformersModel, list[list[int]]]:
    """Return a model of the family, and the output of Hugging Face for each prompt, alone and without padding."""
    from transformers import AutoModelForCausalLM

    path = make_hybrid(folder / family, family)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        found = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
        )
        outputs.append(found[0, len(prompt) :].tolist())
    return load(path), outputs


def make_engine(model: TransformersModel, limits: EngineLimits = SMALL) -> Engine:
    engine = Engine(model, limits, (EOS_TOKEN_ID,), None)
    engine.checks_itself = True
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("family", one_in(3, FAMILIES))
def test_batches_chunks_and_recomputed_prompts_equal_hugging_face(family: str, checkpoints: Path) -> None:
    model, expected = loaded(checkpoints, family)
    assert model._continues_one_by_one == (family in ONE_BY_ONE)
    engine = make_engine(model)
    assert [choices[0] for choices in generate(engine, prompts(), GREEDY)] == expected
    assert len({tuple(one) for one in expected}) > len(expected) // 2
    assert engine.groups.num_preemptions > 0
    assert engine.groups.blocks.num_free == engine.limits.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize("family", one_in(3, FAMILIES))
def test_prompts_and_answers_found_in_the_cache_equal_hugging_face(family: str, checkpoints: Path) -> None:
    model, expected = loaded(checkpoints, family)
    roomy = EngineLimits(400, 8, 8, 32, 256, num_state_slots=300, snapshot_interval=16)
    engine = make_engine(model, roomy)
    blocks = engine.groups.blocks
    assert generate(engine, prompts(), GREEDY) == [[one] for one in expected]
    hits, prefilled = blocks.counters.prefix_hits, engine.num_prefill_tokens
    assert generate(engine, prompts(), GREEDY) == [[one] for one in expected]
    found = sum((len(prompt) - 1) // 8 * 8 for prompt in prompts())
    assert blocks.counters.prefix_hits - hits == found
    assert engine.num_prefill_tokens - prefilled == sum(map(len, prompts())) - found
    # A conversation that continues: the snapshot is at the last full block of the answer.
    longer = [(*prompt, *output, 3, 4) for prompt, output in zip(prompts(), expected, strict=True)]
    hits = blocks.counters.prefix_hits
    again = generate(engine, longer, GREEDY)
    assert blocks.counters.prefix_hits - hits == sum((len(prompt) - 3) // 8 * 8 for prompt in longer)
    assert again == generate(make_engine(model), longer, GREEDY)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3-next", "nemotron-h", "mamba", "minimax"])
def test_preempted_choices_equal_hugging_face(preemption: str, family: str, checkpoints: Path) -> None:
    model, expected = loaded(checkpoints, family)
    limits = EngineLimits(18, 8, 9, 32, 256, 100, num_state_slots=24, snapshot_interval=16, preemption=preemption)
    engine = make_engine(model, limits)
    outputs = generate(engine, prompts(), SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=3))
    counters = engine.groups.counters
    assert (counters.swapped if preemption == "swap" else counters.recomputed) > 0
    assert outputs == [[one] * 3 for one in expected]


@pytest.mark.parametrize("family", ["lfm2", "bamba"])
def test_beams_equal_hugging_face(family: str, checkpoints: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, _ = loaded(checkpoints, family)
    reference = AutoModelForCausalLM.from_pretrained(checkpoints / family, dtype=torch.float32)
    beams = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=3, beam_width=3)
    found = generate(make_engine(model), prompts()[4:6], beams)
    for prompt, choices in zip(prompts()[4:6], found, strict=True):
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            num_beams=3,
            num_return_sequences=3,
            pad_token_id=0,
        )
        rows = [row[len(prompt) :].tolist() for row in out]
        assert choices == [row[: row.index(EOS_TOKEN_ID) + 1] if EOS_TOKEN_ID in row else row for row in rows]


@pytest.mark.parametrize("family", ["jamba", "mamba", "zaya", "qwen3-next"])
def test_modules_that_ignore_a_state_are_found_where_logits_do_not_tell(family: str, tmp_path: Path) -> None:
    """With small weights in bfloat16 the states change the logits by less than the trial allows."""
    path = make_hybrid(tmp_path / family, family, std=0.05)
    ops = kernels.select_ops("cpu", torch.bfloat16)
    model = TransformersModel.load(read_transformers_config(path), ops, "cpu")
    assert model._continues_one_by_one == (family in ONE_BY_ONE)


@pytest.mark.parametrize("family", ["lfm2", "falcon-h1", "mamba2"])
def test_a_request_continues_after_the_tokens_of_an_earlier_worker(family: str, checkpoints: Path) -> None:
    model, expected = loaded(checkpoints, family)
    engine = make_engine(model)
    index = next(at for at, tokens in enumerate(expected) if len(tokens) == MAX_TOKENS)
    request = GenerationRequest("r", "m", prompts()[index], GREEDY)
    engine.add(request, earlier=(StepItem("r", 0, (Delta(0, tuple(expected[index][:5])),), None),))
    items: list[StepItem] = []
    while engine.has_work:
        items += engine.step()
    assert [token for item in items for delta in item.deltas for token in delta.token_ids] == expected[index][5:]

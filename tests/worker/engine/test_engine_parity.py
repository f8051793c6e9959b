"""The engine gives the tokens of Hugging Face in float32, whatever it does to a sequence: models and features.

Prompts of mixed lengths run together in an engine so small that prompts are computed in chunks and sequences are
preempted. tests/worker/test_models_page.py has a row for each architecture that Transformers computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from quire.shared.protocol.messages import Delta, GenerationRequest, SamplingParams, StepItem
from quire.worker.engine.offline import generate
from tests.support.checkpoints import EOS_TOKEN_ID, FAMILIES, make_checkpoint
from tests.support.hybrid_checkpoints import ONE_BY_ONE, make_hybrid
from tests.support.parity import (
    BRIDGED,
    GREEDY,
    MAX_TOKENS,
    Family,
    load,
    load_own,
    make_engine,
    prompts,
    reference,
)
from tests.support.transformers_checkpoints import make_kind

# A model of each kind of layers; those that others of the row stand for are left to `soak`.
OWN = ("llama", "gpt-oss", "gemma4")
OWN_SLOW = ("mixtral-window", "qwen3-moe-mixed", "gemma3", "gemma2")
THEIRS = (
    "phi3",
    "gemma4-shared",  # layers that share caches of two shapes
    "deepseek_v3-yarn",  # latent caches
    "bloom",  # ALiBi
    "gptj",  # attention that Transformers writes out
    "llama4_text-tuned",  # chunks, and queries that are scaled by position
    "lfm2",  # recurrent states: convolutions,
    "qwen3-next",  # delta nets,
    "nemotron-h",  # Mamba-2 and experts,
    "mamba",  # one token at a time,
    "minimax",  # without a convolution
)
THEIRS_SOAK = ("gpt2-scaled", "gemma2" + BRIDGED, "gpt-oss" + BRIDGED, "gemma3_text", "deepseek-v3", "mimo-v2")
THEIRS_SOAK += ("mpt", "falcon-alibi")
THEIRS_SOAK += ("deepseek_v2", "glm4_moe_lite", "longcat", "minicpm3", "youtu", "deepseek_v2-lite")
PLAIN_TORCH = ("mistral", "qwen3-moe", "qwen3-moe" + BRIDGED, "gpt2", "bloom", "deepseek_v3-yarn")
PLAIN_TORCH_SOAK = ("llama3-rope", "qwen2", "mpt", "falcon-alibi", "gpt-neo", "falcon-new")
MODELS = [
    *OWN,
    *(pytest.param(name, marks=pytest.mark.slow) for name in (*OWN_SLOW, *THEIRS)),
    *(pytest.param(name, marks=pytest.mark.soak) for name in THEIRS_SOAK),
]
PREEMPTIONS = ("swap", "recompute")
# In CI the models take turns at the two kinds of preemption; the other kind is left to `soak`.
PREEMPTED = [
    *((name, preemption) for name in OWN for preemption in PREEMPTIONS),
    *(
        pytest.param(name, preemption, marks=pytest.mark.slow if number % 2 == which else pytest.mark.soak)
        for number, name in enumerate((*OWN_SLOW, *THEIRS))
        for which, preemption in enumerate(PREEMPTIONS)
    ),
    *(pytest.param(name, preemption, marks=pytest.mark.soak) for name in THEIRS_SOAK for preemption in PREEMPTIONS),
]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    folder = tmp_path_factory.mktemp("parity")
    return cache(lambda name: Family(name, folder))


@pytest.mark.parametrize(
    ("name", "prefer"),
    [
        *(pytest.param(name, "auto", marks=() if name in (*OWN, "qwen3") else pytest.mark.slow) for name in FAMILIES),
        # Others that Transformers computes: test_models_page.py.
        *(pytest.param(name + BRIDGED, "auto", marks=pytest.mark.slow) for name in ("gpt-oss", "gemma2", "gemma4-moe")),
        *(pytest.param(name, "reference", marks=pytest.mark.slow) for name in PLAIN_TORCH),
        *(pytest.param(name, "reference", marks=pytest.mark.soak) for name in PLAIN_TORCH_SOAK),
    ],
)
def test_greedy_outputs_equal_those_of_hugging_face(name: str, prefer: str, family: Callable[[str], Family]) -> None:
    """prefer: the kernels."""
    one = family(name)
    model = one.model if prefer == "auto" else one.load(prefer)
    engine = make_engine(model, num_blocks=24, prefix_caching=True)
    one.assert_equal(one.generate(engine))
    assert engine.groups.num_preemptions > 0
    assert engine.scheduler.blocks.num_free == engine.limits.num_blocks


@pytest.mark.parametrize(("name", "preemption"), PREEMPTED)
def test_forked_and_preempted_choices_equal_hugging_face(
    name: str, preemption: str, family: Callable[[str], Family]
) -> None:
    one = family(name)
    engine = make_engine(one.model, num_blocks=24, num_host_blocks=200, preemption=preemption, prefix_caching=True)
    one.assert_equal(one.generate(engine, n=3))
    counters = engine.groups.counters
    assert (counters.swapped if preemption == "swap" else counters.recomputed) > 0


@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_answers_found_in_the_cache_equal_hugging_face(name: str, family: Callable[[str], Family]) -> None:
    """All prompts run twice, one prompt is cut at every block boundary, and answers are continued."""
    one = family(name)
    engine = make_engine(one.model, num_blocks=400, num_state_slots=300 if one.model.state_bytes else 0)
    blocks = engine.scheduler.blocks
    first = one.generate(engine)
    one.assert_equal(first)
    hits, computed = blocks.counters.prefix_hits, engine.num_prefill_tokens
    assert one.generate(engine) == first
    cached = sum((len(prompt) - 1) // 8 * 8 for prompt in one.prompts)
    assert blocks.counters.prefix_hits - hits >= cached
    assert engine.num_prefill_tokens - computed <= sum(map(len, one.prompts)) - cached
    longest = max(one.prompts, key=len)
    again = [longest[: at + near] for at in range(8, 88, 8) for near in (-1, 0, 1)]
    again += [(*prompt, *answer, 3, 4) for prompt, (answer,) in zip(one.prompts, first, strict=True)]
    hits = blocks.counters.prefix_hits
    found = generate(engine, again, GREEDY)
    assert blocks.counters.prefix_hits - hits >= sum((len(prompt) - 3) // 8 * 8 for prompt in again[-len(first) :])
    assert found == generate(make_engine(one.model, num_blocks=400, prefix_caching=False), again, GREEDY)


@pytest.mark.parametrize("name", [*OWN, *(pytest.param(name, marks=pytest.mark.slow) for name in (*OWN_SLOW, "phi3"))])
def test_a_seeded_request_draws_the_same_text_alone_and_in_a_busy_batch(name: str, tmp_path: Path) -> None:
    """The products of the C++ kernels do not depend on the batch; torch computes all other operations row by row."""
    bridged = name == "phi3"
    model = (
        load(make_kind(tmp_path, name, std=0.1))
        if bridged
        else load_own(make_checkpoint(tmp_path, name, initializer_range=0.1))
    )
    asked = prompts()[:12]
    params = [SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=seed) for seed in range(len(asked))]
    crowd = make_engine(model, num_blocks=24)
    together = generate(crowd, asked, params)
    assert crowd.groups.num_preemptions > 0
    alone = [generate(make_engine(model), [prompt], one)[0] for prompt, one in zip(asked, params, strict=True)]
    assert together == alone
    assert len({tuple(choices[0]) for choices in alone}) == len(asked)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=mark) for name, mark in (("lfm2", pytest.mark.slow), ("bamba", pytest.mark.soak))]
)
def test_beams_of_models_with_states_equal_hugging_face(name: str, family: Callable[[str], Family]) -> None:
    """test_beams_parity.py has the beams of Quire's decoder."""
    one = family(name)
    asked = one.prompts[3:6]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=3, beam_width=3)
    there = reference(one.path)
    for prompt, choices in zip(asked, generate(make_engine(one.model), asked, params), strict=True):
        ids = torch.tensor([prompt])
        sizes = {"max_new_tokens": MAX_TOKENS, "num_beams": 3, "num_return_sequences": 3, "pad_token_id": 0}
        rows = [
            row[len(prompt) :].tolist() for row in there.generate(ids, attention_mask=torch.ones_like(ids), **sizes)
        ]
        assert choices == [row[: row.index(EOS_TOKEN_ID) + 1] if EOS_TOKEN_ID in row else row for row in rows]


@pytest.mark.parametrize(
    "name",
    [pytest.param("lfm2", marks=pytest.mark.slow)]
    + [pytest.param(name, marks=pytest.mark.soak) for name in ("falcon-h1", "mamba2")],
)
def test_a_request_continues_after_the_tokens_of_an_earlier_worker(name: str, family: Callable[[str], Family]) -> None:
    one = family(name)
    answers = one.generate(make_engine(one.model))
    at, [whole] = next((at, found) for at, found in enumerate(answers) if len(found[0]) == MAX_TOKENS)
    engine = make_engine(one.model)
    earlier = StepItem("r", 0, (Delta(0, tuple(whole[:5])),), None)
    engine.add(GenerationRequest("r", "m", one.prompts[at], GREEDY), earlier=(earlier,))
    items: list[StepItem] = []
    while engine.has_work:
        items += engine.step()
    assert [token for item in items for delta in item.deltas for token in delta.token_ids] == whole[5:]


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba", "qwen3-next")),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("jamba", "zaya")),
    ],
)
def test_modules_that_ignore_a_state_are_found_where_logits_do_not_tell(name: str, tmp_path: Path) -> None:
    """With small weights in bfloat16 the states change the logits by less than the trial allows."""
    model = load(make_hybrid(tmp_path, name, std=0.05), dtype=torch.bfloat16)
    assert model._continues_one_by_one == (name in ONE_BY_ONE)

"""Models that Transformers computes give the same tokens with paged attention as without.

The tests cover all that the engine does to a sequence, as those of Quire's own decoder do (test_engine_parity.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.shared.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.models.choice import TRANSFORMERS, choose_model
from quire.worker.models.transformers_backend import TransformersModel
from quire.worker.models.transformers_config import TransformersConfig
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.selection import one_in
from tests.support.transformers_checkpoints import KINDS, LLAMA_LIKE, change, make_kind, make_other
from tests.worker.engine.test_engine_parity import MAX_TOKENS, by_hugging_face, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
SMALL = {"num_blocks": 40, "block_size": 8, "max_num_seqs": 12, "max_num_batched_tokens": 32}


def load(path: Path, prefer: str = "auto", dtype: torch.dtype = torch.float32) -> TransformersModel:
    config = choose_model(path, TRANSFORMERS)
    assert isinstance(config, TransformersConfig)
    return TransformersModel.load(config, kernels.select_ops("cpu", dtype, prefer), "cpu")


def make_engine(model: TransformersModel, **limits: Any) -> Engine:
    engine = Engine(
        model,
        EngineLimits(**(SMALL | {"max_model_len": model.max_model_len} | limits)),
        model.config.eos_token_ids,
        None,
    )
    engine.checks_itself = True
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_greedy_outputs_equal_those_of_hugging_face(kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    engine = make_engine(load(path))
    outputs = generate(engine, prompts(), GREEDY)
    assert engine.groups.num_preemptions > 0
    assert engine.scheduler.blocks.num_free == engine.limits.num_blocks
    found = [choices[0] for choices in outputs]
    assert len({tuple(one) for one in found}) > len(found) // 2
    assert found == by_hugging_face(path)


# Fields of config.json files on the Hugging Face Hub, which differ from those that Transformers writes.
HUB = {
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "internlm3": {"architectures": ["InternLM3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_internlm3.X"}},
    "deepseek-v3": {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
}


@pytest.mark.parametrize("kind", HUB)
def test_names_of_the_hub_are_computed_as_what_they_are(kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    expected = by_hugging_face(path)
    change(path, **HUB[kind])
    assert [choices[0] for choices in generate(make_engine(load(path)), prompts(), GREEDY)] == expected


def test_yarn_that_a_model_card_adds_stretches_the_context(tmp_path: Path) -> None:
    """The card's fields have older names, next to those of Transformers. max_position_embeddings is unstretched."""
    from transformers import AutoModelForCausalLM

    path = make_other(tmp_path / "qwen2", "qwen2", **(LLAMA_LIKE | {"max_position_embeddings": 64}))
    change(path, rope_theta=500.0, rope_scaling={"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64})
    model = load(path)
    assert model.max_model_len == 192
    engine = make_engine(model, num_blocks=200)
    assert [choices[0] for choices in generate(engine, prompts(), GREEDY)] == by_hugging_face(path)
    long = tuple((7 * at * at + 3) % VOCAB_SIZE for at in range(192 - MAX_TOKENS))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    expected = reference.generate(torch.tensor([long]), max_new_tokens=MAX_TOKENS, do_sample=False)[0, len(long) :]
    assert generate(engine, [long], GREEDY) == [[expected.tolist()]]


@pytest.mark.parametrize(
    ("kind", "widths"),
    [
        # The heads and the width of each cache.
        ("gemma4-text", [(2, 16), (2, 48), (2, 16), (2, 48)]),
        ("gemma4-global-heads", [(2, 16), (1, 48), (2, 16), (1, 48)]),
        ("gemma4-shared", [(2, 16), (2, 48)]),
        ("mimo-v2", [(4, 32), (2, 32), (4, 32)]),
    ],
)
def test_layers_have_caches_of_their_own_shapes(kind: str, widths: list[tuple[int, int]], tmp_path: Path) -> None:
    model = load(make_kind(tmp_path / kind, kind))
    cache = model.alloc_kv_cache(3, 16)
    assert [(keys.shape[1], keys.shape[3]) for keys, _ in cache.layers] == widths
    assert sum(part.nbytes for layer in cache.layers for part in layer) == 3 * model.kv_bytes_per_block(16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", one_in(3, ["gemma4-shared", "gpt2-scaled", "gemma2", "gpt-oss", "gemma3", "deepseek-v3", "mimo-v2"])
)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_choices_equal_hugging_face(preemption: str, kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    engine = make_engine(load(path), num_host_blocks=200, preemption=preemption)
    outputs = generate(engine, prompts(), SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=3))
    counters = engine.groups.counters
    assert (counters.swapped if preemption == "swap" else counters.recomputed) > 0
    assert outputs == [[expected] * 3 for expected in by_hugging_face(path)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gemma4-shared", "gpt-oss", "mimo-v2"])
def test_prompts_found_in_the_cache_give_what_they_give_without_it(kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    engine = make_engine(load(path), num_blocks=200, prefix_caching=True)
    expected = [[one] for one in by_hugging_face(path)]
    assert generate(engine, prompts(), GREEDY) == expected
    hits = engine.scheduler.blocks.counters.prefix_hits
    assert generate(engine, prompts(), GREEDY) == expected
    assert engine.scheduler.blocks.counters.prefix_hits > hits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "qwen3-moe"])
def test_plain_torch_kernels_do_as_well(kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    outputs = generate(make_engine(load(path, "reference")), prompts(), GREEDY)
    assert [choices[0] for choices in outputs] == by_hugging_face(path)


def test_a_seeded_request_draws_the_same_text_alone_and_in_a_busy_batch(tmp_path: Path) -> None:
    """The products of the C++ kernels do not depend on the batch; torch computes all other operations row by row."""
    model = load(make_kind(tmp_path / "phi3", "phi3", std=0.1))
    params = [SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=seed) for seed in range(32)]
    crowd = make_engine(model, num_blocks=48)
    together = generate(crowd, prompts(), params)
    assert crowd.groups.num_preemptions > 0
    alone = [
        generate(make_engine(model, num_blocks=200), [prompt], one)[0]
        for prompt, one in zip(prompts(), params, strict=True)
    ]
    assert together == alone
    assert len({tuple(choices[0]) for choices in alone}) == 32


def test_logits_are_those_of_transformers_in_float32_and_near_them_in_bfloat16(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from quire.worker.models import transformers_trial as trial

    path = make_kind(tmp_path / "gpt-neox", "gpt-neox")
    model = load(path)
    texts = [torch.arange(3, 12, dtype=torch.int32), torch.arange(40, 43, dtype=torch.int32)]
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    expected = trial.by_transformers(exact.eval(), texts)
    assert float((trial.over_pages(model, texts) - expected).abs().max()) < 1e-4
    rough = trial.over_pages(load(path, dtype=torch.bfloat16), texts)
    assert 0 < float((rough - expected).norm() / expected.norm()) < 0.05

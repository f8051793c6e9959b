"""Models that Transformers computes give the same tokens with paged attention as without.

The tests cover all that the engine does to a sequence, as those of Quire's own decoder do (test_engine_parity.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.worker.engine.offline import generate
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import GREEDY, MAX_TOKENS, by_hugging_face, load, make_engine, prompts
from tests.support.transformers_checkpoints import LLAMA_LIKE, change, make_kind, make_other

pytestmark = pytest.mark.usefixtures("one_thread")


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

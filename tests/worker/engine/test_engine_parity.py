"""Greedy outputs of the whole engine are those of Hugging Face `generate`, token for token, in float32.

32 prompts of mixed lengths run together in an engine so small that prompts are computed in chunks and sequences are
preempted and recomputed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.shared.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.models.decoder import Decoder
from tests.support.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 16
# Shapes whose sharded form is tried as well, and those that run on the plain-torch kernels too.
SHARDED = ("llama", "qwen3")
CASES = [(family, False, "auto") for family in FAMILIES]
CASES += [(family, True, "auto") for family in SHARDED]
CASES += [(family, False, "reference") for family in ("llama3-rope", "mistral", "qwen2", "qwen3-moe")]
# A family of each shape of layers, for all that the engine does to a sequence.
SHAPES = ("llama", "mixtral-window", "qwen3-moe-mixed", "gpt-oss", "gemma3", "gemma2", "gemma4")


def prompts() -> list[tuple[int, ...]]:
    """32 prompts of 1 to 90 tokens."""
    draw = random.Random(5)
    lengths = [1, 2, 15, 16, 17, 90, *(draw.randint(3, 70) for _ in range(26))]
    return [tuple(draw.randrange(VOCAB_SIZE - 3) for _ in range(length)) for length in lengths]


def by_hugging_face(path: Path) -> list[list[int]]:
    """Return the output of Hugging Face for each prompt, including an end token. Prompts are padded on the left."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    longest = max(map(len, prompts()))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts()])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts()])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
    end = model.generation_config.eos_token_id
    rows = out[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@pytest.mark.parametrize(("family", "sharded", "prefer"), CASES)
def test_greedy_outputs_equal_those_of_hugging_face(family: str, sharded: bool, prefer: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / family, family, sharded=sharded)
    assert len(list(path.glob("*.safetensors"))) > 1 or not sharded
    ops = kernels.select_ops("cpu", torch.float32, prefer)
    model = Decoder.load(path, ops, torch.float32, "cpu")
    limits = EngineLimits(
        num_blocks=40, block_size=8, max_num_seqs=12, max_num_batched_tokens=32, max_model_len=model.max_model_len
    )
    engine = Engine(model, limits, model.config.eos_token_ids, None)
    outputs = generate(engine, prompts(), SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
    assert engine.groups.num_preemptions > 0
    assert engine.scheduler.blocks.num_free == limits.num_blocks
    assert [choices[0] for choices in outputs] == by_hugging_face(path)


@pytest.mark.parametrize("family", SHAPES)
def test_a_seeded_request_draws_the_same_text_alone_and_in_a_busy_batch(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / family, family, initializer_range=0.1)
    model = Decoder.load(path, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")

    def engine(num_blocks: int) -> Engine:
        return Engine(model, EngineLimits(num_blocks, 8, 12, 32, model.max_model_len), (), None)

    params = [SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=seed) for seed in range(32)]
    crowd = engine(num_blocks=48)
    together = generate(crowd, prompts(), params)
    assert crowd.groups.num_preemptions > 0
    alone = [generate(engine(200), [prompt], one)[0] for prompt, one in zip(prompts(), params, strict=True)]
    assert together == alone
    assert len({tuple(choices[0]) for choices in alone}) == 32


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"num_blocks": 40, "num_host_blocks": 200, "preemption": "swap"}, id="forced swap"),
        pytest.param({"num_blocks": 40, "preemption": "recompute", "prefix_caching": True}, id="recomputed and cached"),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("family", SHAPES)
def test_preempted_choices_equal_hugging_face(limits: dict[str, Any], n: int, family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / family, family)
    model = Decoder.load(path, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")
    sizes = {"block_size": 8, "max_num_seqs": 12, "max_num_batched_tokens": 32, "max_model_len": model.max_model_len}
    engine = Engine(model, EngineLimits(**(sizes | limits)), model.config.eos_token_ids, None)
    engine.checks_itself = True
    outputs = generate(engine, prompts(), SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=n))
    counters = engine.groups.counters
    assert (counters.swapped if limits["preemption"] == "swap" else counters.recomputed) > 0
    assert outputs == [[expected] * n for expected in by_hugging_face(path)]


@pytest.mark.parametrize("family", SHAPES)
def test_prompts_found_in_the_cache_give_what_they_give_without_it(family: str, tmp_path: Path) -> None:
    """All prompts run twice, and one prompt is cut at every block boundary."""
    path = make_checkpoint(tmp_path / family, family)
    model = Decoder.load(path, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)

    def engine(prefix_caching: bool) -> Engine:
        limits = EngineLimits(200, 8, 12, 64, model.max_model_len, prefix_caching=prefix_caching)
        return Engine(model, limits, model.config.eos_token_ids, None)

    warm = engine(prefix_caching=True)
    expected = [[one] for one in by_hugging_face(path)]
    assert generate(warm, prompts(), params) == expected
    hits = warm.scheduler.blocks.counters.prefix_hits
    assert generate(warm, prompts(), params) == expected
    assert warm.scheduler.blocks.counters.prefix_hits - hits >= sum((len(one) - 1) // 8 * 8 for one in prompts())
    longest = max(prompts(), key=len)
    cuts = [longest[: at + near] for at in range(8, 88, 8) for near in (-1, 0, 1)]
    assert generate(warm, cuts, params) == generate(engine(prefix_caching=False), cuts, params)

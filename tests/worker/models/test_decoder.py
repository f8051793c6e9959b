"""The decoder computes the logits of Transformers, however the engine splits the work into steps and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.kernels import CpuOps, KernelsUnavailable, Ops, ReferenceOps
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.native.config import read_config
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.native.rope import cos_sin_table
from tests.support.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.support.quantized import edit_config

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4  # for another order of sums in float32; logits have a standard deviation of about 2.5
BLOCK_SIZE = 8
LENGTHS = (40, 7, 19, 33)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from the name of a family to the folder of its checkpoint, which it writes once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def get(family: str) -> Path:
        path = folder / family
        return path if path.exists() else make_checkpoint(path, family, sharded=family == "qwen2")

    return get


def operations(name: str, dtype: torch.dtype = torch.float32) -> Ops:
    if name == "reference":
        return ReferenceOps("cpu", dtype)
    try:
        return CpuOps(dtype)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def draw_prompts(seed: int) -> list[torch.Tensor]:
    """Return one prompt of each length in LENGTHS."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def transformers_logits(path: Path, token_ids: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype)
    with torch.inference_mode():
        return [model(ids[None]).logits[0].float() for ids in token_ids]


@pytest.fixture(scope="session")
def expected(checkpoints):
    """Return a function from a family to four prompts and the logits of Transformers for all their positions."""
    known: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def get(family: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if family not in known:
            prompts = draw_prompts(1)
            known[family] = prompts, transformers_logits(checkpoints(family), prompts, torch.float32)
        return known[family]

    return get


@dataclass
class Stepper:
    """Runs prompts as the engine does: each has blocks scattered over a cache whose unwritten memory is NaN."""

    decoder: Decoder
    prompts: list[torch.Tensor]

    def __post_init__(self) -> None:
        needed = [-(-len(prompt) // BLOCK_SIZE) for prompt in self.prompts]
        blocks = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(2)).to(torch.int32)
        self.cache = self.decoder.alloc_kv_cache(len(blocks), BLOCK_SIZE)
        for tensor in (tensor for pair in self.cache.layers for tensor in pair):
            tensor.fill_(float("nan"))
        self.tables = torch.full((len(self.prompts), max(needed)), 2**30, dtype=torch.int32)
        for table, own in zip(self.tables, blocks[: sum(needed)].split(needed), strict=True):
            table[: len(own)] = own
        self.computed = [0] * len(self.prompts)

    def step(self, counts: dict[int, int]) -> dict[int, torch.Tensor]:
        """Compute the next `counts[s]` tokens of each sequence s, in the order of `counts`. Return their logits."""
        ids, positions, slots, starts = [], [], [], [0]
        for s, count in counts.items():
            at = torch.arange(self.computed[s], self.computed[s] + count)
            ids.append(self.prompts[s][at])
            positions.append(at)
            slots.append(self.tables[s][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
            starts.append(starts[-1] + count)
            self.computed[s] += count
        batch = ForwardBatch(
            token_ids=torch.cat(ids).to(torch.int32),
            positions=torch.cat(positions).to(torch.int32),
            slot_mapping=torch.cat(slots).to(torch.int32),
            block_tables=self.tables[list(counts)].contiguous(),
            seq_lens=torch.tensor([self.computed[s] for s in counts], dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            logits_rows=torch.arange(starts[-1]),
        )
        with torch.inference_mode():
            logits = self.decoder.forward(batch, self.cache)
        assert logits.dtype is torch.float32
        return dict(zip(counts, logits.split(list(counts.values())), strict=True))

    def run(self, steps: list[dict[int, int]]) -> list[torch.Tensor]:
        """Return the logits of all positions of all prompts."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.prompts]
        for counts in steps:
            for s, logits in self.step(counts).items():
                parts[s].append(logits)
        assert self.computed == [len(prompt) for prompt in self.prompts]
        return [torch.cat(part) for part in parts]


WHOLE = [{0: 40, 1: 7, 2: 19, 3: 33}]
# Steps that mix prompt chunks, which end inside blocks, with decodes (a count of 1) of other sequences. The order of
# the sequences changes from step to step.
MIXED = [
    {1: 6, 0: 13},
    {1: 1, 0: 9, 2: 5},
    {2: 14, 0: 17, 3: 3},
    {0: 1, 3: 29},
    {3: 1},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, "cpu") for family in FAMILIES),
        *(
            pytest.param(family, "reference", marks=() if family in ("llama", "gemma4-moe") else pytest.mark.soak)
            for family in FAMILIES
        ),
    ],
)
def test_logits_are_those_of_transformers(family, name, checkpoints, expected):
    decoder = Decoder.load(checkpoints(family), operations(name), torch.float32, "cpu", 256)
    prompts, logits = expected(family)
    whole, mixed = (Stepper(decoder, prompts).run(steps) for steps in (WHOLE, MIXED))
    for s, truth in enumerate(logits):
        torch.testing.assert_close(whole[s], truth, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(mixed[s], truth, rtol=0, atol=TOLERANCE)


def test_row_invariant_kernels_give_equal_bits_however_the_work_is_cut(checkpoints, expected):
    decoder = Decoder.load(checkpoints("qwen3"), operations("cpu"), torch.float32, "cpu", 256)
    prompts, _ = expected("qwen3")
    whole, mixed = (Stepper(decoder, prompts).run(steps) for steps in (WHOLE, MIXED))
    assert all(torch.equal(one, two) for one, two in zip(whole, mixed, strict=True))


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_bfloat16_is_as_near_to_the_exact_result_as_transformers_is(family, tmp_path):
    # Quire and Transformers both round to 8 bits after every operation, but in different places (attention weights,
    # silu, logits), and neither result is exact. So the test compares both with float32 of the same weights, and allows
    # the decoder a tenth more error. One token of one draw has the largest error: eight draws make the largest errors
    # comparable on every processor.
    path = make_checkpoint(tmp_path / family, family, dtype=torch.bfloat16)
    draws = [draw_prompts(seed) for seed in range(1, 9)]
    every = [prompt for prompts in draws for prompt in prompts]
    exact = torch.cat(transformers_logits(path, every, torch.float32))
    theirs = torch.cat(transformers_logits(path, every, torch.bfloat16))
    for name in ("reference", "cpu"):
        decoder = Decoder.load(path, operations(name, torch.bfloat16), torch.bfloat16, "cpu", 256)
        ours = torch.cat([logits for prompts in draws for logits in Stepper(decoder, prompts).run(MIXED)])
        assert (ours - exact).pow(2).mean().sqrt() < 1.1 * (theirs - exact).pow(2).mean().sqrt()
        assert (ours - exact).abs().max() < 1.5 * (theirs - exact).abs().max()


@pytest.mark.parametrize("family", ["llama", "llama3-rope", "llama-linear-rope"])
def test_cosines_and_sines_are_equal_to_those_of_transformers_bit_for_bit(family, checkpoints):
    decoder = Decoder.load(checkpoints(family), operations("reference"), torch.float32, "cpu", 256)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints(family))
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(256)[None])
    half = decoder.config.head_dim // 2
    table = cos_sin_table(decoder.config.rope, decoder.config.head_dim, 256)
    assert torch.equal(table, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1))


@pytest.mark.parametrize("window", [1, 5, 100])
def test_any_sliding_window_is_that_of_transformers(window, expected, tmp_path):
    # Windows of one token, of less than a block, and of more than every context. The family's own window is one block.
    path = make_checkpoint(tmp_path / "mistral", "mistral", sliding_window=window)
    prompts, _ = expected("mistral")
    truth = transformers_logits(path, prompts, torch.float32)
    for name in ("reference", "cpu"):
        decoder = Decoder.load(path, operations(name), torch.float32, "cpu", 256)
        found = Stepper(decoder, prompts).run(MIXED)
        torch.testing.assert_close(torch.cat(found), torch.cat(truth), rtol=0, atol=TOLERANCE)


def test_swapping_without_host_memory_is_a_mistake_of_the_caller(checkpoints):
    cache = Decoder.load(checkpoints("llama"), operations("cpu"), torch.float32, "cpu", 256).alloc_kv_cache(4, 8)
    assert cache.host is None
    for swap in (cache.swap_out, cache.swap_in):
        with pytest.raises(AssertionError, match="no host blocks"):
            swap([0], [0])


@pytest.mark.parametrize(
    ("family", "ranks", "reason"),
    [
        ("llama", None, ""),
        ("gemma3", None, ""),
        ("llama", object(), "--tensor-parallel-size above 1; set it to 1, or merge the adapter"),
        ("mixtral", None, "layers with experts, which MixtralForCausalLM has; merge the adapter"),
        ("mixtral", object(), "layers with experts, which MixtralForCausalLM has; merge the adapter"),
    ],
)
def test_a_model_says_why_it_takes_no_adapters(family, ranks, reason, tmp_path):
    model = SimpleNamespace(config=read_config(make_checkpoint(tmp_path, family)), _ranks=ranks, tower=None)
    found = Decoder.why_no_adapters.fget(model)
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral-full", "qwen2", "qwen3"])
@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_yarn_that_a_model_card_adds_is_computed_to_its_full_length(family, ops, tmp_path):
    """The card leaves max_position_embeddings at the original length, and names the type as older versions did."""
    # YaRN makes scores larger, and with them the effect of another order of sums: so these weights are smaller.
    path = make_checkpoint(tmp_path, family, max_position_embeddings=32, initializer_range=0.2)
    card = {"type": "yarn", "factor": 6.0, "original_max_position_embeddings": 32}
    edit_config(path, rope_parameters=None, rope_theta=500.0, rope_scaling=card)
    assert read_config(path).max_position_embeddings == 192
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in (192, 30)]
    decoder = Decoder.load(path, operations(ops), torch.float32, "cpu")
    assert decoder.max_model_len == 192
    steps = [{0: 20}, {0: 100, 1: 30}, {0: 72}]
    found, expected = Stepper(decoder, prompts).run(steps), transformers_logits(path, prompts, torch.float32)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    edit_config(path, rope_scaling=None)
    plain = transformers_logits(path, [prompts[1]], torch.float32)
    assert (plain[0] - found[1]).abs().max() > 0.1, "YaRN changes all positions"

"""Attention beyond that of Llama: ALiBi, chunks, scaled queries, indexes of keys, latent caches."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quire import kernels
from quire.shared.process.errors import NotSupported
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.offline import generate
from quire.worker.models.transformers import latent_attention, trial
from quire.worker.models.transformers.alibi import AlibiBias, mpt_slopes_of, slopes_of
from quire.worker.models.transformers.attention_chunks import tables_in_chunks
from quire.worker.models.transformers.bridge import TransformersModel
from quire.worker.models.transformers.config import read_transformers_config
from quire.worker.models.transformers.latent_attention import find_latent_layers
from quire.worker.models.transformers.linear import PackedLinearModule
from quire.worker.models.transformers.query_scales import LogQueryScale, take_query_scales
from quire.worker.models.transformers.shapes import AttentionShape
from quire.worker.models.transformers.sparse_attention import compressed_keys
from quire.worker.models.transformers.trial import by_transformers, over_pages, texts
from tests.support.architectures import ARCHITECTURES
from tests.support.parity import GREEDY, MAX_TOKENS, assert_greedy, load, load_reference, make_engine, prompts, refusal
from tests.support.served_models import reference
from tests.support.transformers_checkpoints import WRITTEN, make_other


def make_written(folder: Path, kind: str, **fields: Any) -> Path:
    return make_other(folder / kind, WRITTEN[kind][0], **(WRITTEN[kind][1] | fields))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon-alibi"])
def test_biases_of_distant_keys_are_exact(kind: str, tmp_path: Path) -> None:
    """Biases grow to more than 1000, and scores differ by fractions of 1."""
    context = {"bloom": "seq_length", "mpt": "max_seq_len", "falcon-alibi": "max_position_embeddings"}[kind]
    path = make_written(tmp_path, kind, **{context: 2048})
    prompt = tuple((7 * at * at + 3) % 250 for at in range(2048 - MAX_TOKENS))
    engine = make_engine(load(path), num_blocks=300, max_num_batched_tokens=512)
    assert_greedy(reference(path), [prompt], generate(engine, [prompt], GREEDY)[0])


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon-alibi", "gptj"])
@pytest.mark.slow
def test_activations_of_16_bits_give_logits_near_the_exact_ones(kind: str, tmp_path: Path) -> None:
    path = make_written(tmp_path, kind)
    texts = [torch.arange(3, 14, dtype=torch.int32), torch.arange(40, 46, dtype=torch.int32)]
    expected = trial.by_transformers(reference(path), texts)
    assert float((trial.over_pages(load(path), texts) - expected).abs().max()) < 1e-4
    rough = trial.over_pages(load(path, dtype=torch.bfloat16), texts)
    assert 0 < float((rough - expected).norm() / expected.norm()) < 0.05


@pytest.mark.slow
def test_linear_layers_of_all_families_are_packed(tmp_path: Path) -> None:
    for kind in ("falcon", "bloom", "codegen"):
        model = load(make_written(tmp_path, kind))
        assert sum(isinstance(one, PackedLinearModule) for one in model._model.modules()) == 3 * 4 + 1
        assert model.is_row_invariant


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.slow
def test_caches_of_8_bits_are_refused_for_alibi(dtype: torch.dtype, tmp_path: Path) -> None:
    ops = kernels.select_ops("cpu", torch.float32, kv_dtype=dtype)
    config = read_transformers_config(make_written(tmp_path, "bloom"))
    with pytest.raises(NotSupported, match=r"\(ALiBi\), which a cache of 8 bits .* give --kv-cache-dtype auto"):
        TransformersModel.load(config, ops, "cpu")
    assert TransformersModel.load(read_transformers_config(make_written(tmp_path, "gptj")), ops, "cpu")


@pytest.mark.parametrize(("field", "value"), [("qk_ln", True), ("alibi", False), ("attn_type", "multiquery_attention")])
def test_fields_of_mpt_that_transformers_ignores_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    said = refusal(make_written(tmp_path, "mpt", attn_config={field: value}))
    assert f"{field} of its attn_config is {value!r}" in said


def test_the_context_of_bloom_is_that_of_its_training_if_it_says_none(tmp_path: Path) -> None:
    assert read_transformers_config(make_written(tmp_path, "bloom")).max_position_embeddings == 256
    fields = {key: value for key, value in WRITTEN["bloom"][1].items() if key != "seq_length"}
    path = make_other(tmp_path / "plain", "bloom", **fields)
    assert read_transformers_config(path).max_position_embeddings == 2048


CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 32, 71])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.mpt import modeling_mpt

    assert torch.allclose(slopes_of(heads, CPU), _get_alibi_slopes(heads, CPU), rtol=1e-6, atol=0)
    build: Any = modeling_mpt.build_mpt_alibi_tensor
    biases = build(heads, 2, 8)  # [H, 1, 2]: those of the key before, and of the key itself
    assert torch.allclose(mpt_slopes_of(heads, 8, CPU), -biases[:, 0, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_have_the_bias_in_each_type(dtype: torch.dtype) -> None:
    """Summed in float32, as kernels do. The parts are products of 8 bits by 8 bits, and therefore exact."""
    slopes, scale = slopes_of(6, CPU), 128**-0.5
    positions = torch.tensor([0, 1, 255, 2047, 30_000])
    zeros = torch.zeros(1, 6, 5, 16, dtype=dtype)
    q, k = AlibiBias(slopes, scale).extend(zeros, zeros, positions)
    assert q.dtype is k.dtype is dtype
    assert q.shape == k.shape == (1, 6, 5, 25)
    scores = (q.float() @ k.float().transpose(2, 3)) * scale
    expected = (slopes[:, None, None] * positions).expand(6, 5, 5)
    assert torch.allclose(scores[0], expected, rtol=1e-6, atol=1e-6)


def test_biases_of_falcon_are_rounded_as_it_was_trained() -> None:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    zeros = torch.zeros(1, 6, 300, 16)
    q, k = AlibiBias(slopes_of(6, CPU), 1.0, rounded=True).extend(zeros, zeros, torch.arange(300))
    expected = build_alibi_tensor(torch.ones(1, 300, dtype=torch.int64), 6, torch.float32)
    assert torch.equal((q @ k.transpose(2, 3))[0, :, :1], expected)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_short_sequences_keep_their_tables() -> None:
    tables = torch.tensor([[3, 4], [5, 6]], dtype=torch.int32), int32(32, 7), int32(0, 1, 8)
    assert tables_in_chunks(tables, 32, 16) is tables


def test_a_sequence_is_cut_where_chunks_begin() -> None:
    blocks = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]], dtype=torch.int32)
    # The last 25 of 38 tokens, the last of 33, and a sequence without tokens in this step.
    tables, lengths, starts = tables_in_chunks((blocks, int32(38, 33, 40), int32(0, 25, 26, 26)), 16, 8)
    assert lengths.tolist() == [16, 16, 6, 1]
    assert starts.tolist() == [0, 3, 19, 25, 26]
    assert [row[: -(-n // 8)] for row, n in zip(tables.tolist(), lengths.tolist(), strict=True)] == [
        [1, 2],
        [3, 4],
        [5],
        [10],
    ]


def make(folder: Path, kind: str, **changes: Any) -> Path:
    model_type, fields = ARCHITECTURES[kind]
    return make_other(folder / kind, model_type, **(fields | changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_contexts_up_to_the_selected_number_are_served(kind: str, tmp_path: Path) -> None:
    path = make(tmp_path, kind, index_topk=128)
    model = load(path, 128)
    assert all(shape.latent is not None for shape in model._shapes)
    engine = make_engine(model, num_host_blocks=200, preemption="swap")
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=2)
    outputs = generate(engine, prompts(), params)
    assert engine.groups.counters.swapped > 0
    assert_greedy(load_reference(path), prompts(), [choices[0] for choices in outputs])
    assert all(choices == choices[:1] * 2 for choices in outputs)


@pytest.mark.slow
def test_longer_contexts_are_refused_with_the_number(tmp_path: Path) -> None:
    said = refusal(make(tmp_path, "deepseek_v32", index_topk=128), 129)
    assert "its attention takes indices" in said
    assert said.endswith("give --max-model-len 128, the number of tokens that its index selects, or less")


@pytest.mark.slow
def test_compressed_keys_are_refused_by_name(tmp_path: Path) -> None:
    said = refusal(make(tmp_path, "deepseek_v4"), 64)
    assert "attend to compressed keys, one for several tokens (layer_types heavily_compressed_attention)" in said
    assert "see docs/quickstart.md" in said
    both = ["full_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    assert "compressed_sparse_attention, heavily" in compressed_keys(SimpleNamespace(layer_types=both))
    assert compressed_keys(SimpleNamespace(layer_types=None)) == compressed_keys(SimpleNamespace()) == ""


@pytest.mark.slow
def test_only_layers_without_rotation_leave_their_factor_to_the_attention(tmp_path: Path) -> None:
    model_type, fields = ARCHITECTURES["llama4_text-tuned"]
    path = make_other(tmp_path / "llama4", model_type, **fields)
    layers = load(path)._model.model.layers
    assert [hasattr(layer.self_attn, "query_scale") for layer in layers] == [False, True, False]
    assert not layers[1].self_attn.attn_temperature_tuning


@pytest.mark.slow
def test_the_trial_sees_the_factors_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a period of 8 tokens the factors matter in the texts of the trial: other factors are refused."""
    from transformers import AutoModelForCausalLM

    from quire.shared.process.errors import NotSupported

    model_type, fields = ARCHITECTURES["llama4_text-tuned"]
    path = make_other(tmp_path / "llama4", model_type, **fields)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    text = torch.arange(3, 14, dtype=torch.int32)
    with_factors = by_transformers(model, [text])
    take_query_scales(model)
    assert not torch.allclose(by_transformers(model, [text]), with_factors)
    monkeypatch.setattr(LogQueryScale, "__call__", lambda self, positions: torch.ones(len(positions)))
    with pytest.raises(NotSupported, match="gives other logits with paged attention"):
        load(path)


# All types of Transformers with MLA that are served, and sizes that are no multiples of 16.
def test_a_token_takes_one_row_per_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of DeepSeek-V3: 512 latent values and 64 with positions, in place of keys and values of each head."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64}
    path = make(tmp_path, "deepseek-v3", **sizes)
    with caplog.at_level(logging.INFO):
        model = load(path)
    assert "3 layers have a latent KV cache: 576 values per token instead of 1536 for keys and values" in caplog.text
    assert model.kv_bytes_per_block(16) == 3 * 16 * 576 * 4
    cache = model.alloc_kv_cache(5, 16)
    assert sum(layer[0].nbytes for layer in cache.layers) == 5 * model.kv_bytes_per_block(16)
    monkeypatch.setattr(latent_attention, "latent_ops", lambda ops: None)
    expanded = load(path)
    assert expanded.kv_bytes_per_block(16) == 3 * 16 * 4 * 2 * 192 * 4
    both = texts(model.vocab_size, 64)
    found, expected = over_pages(model, both), over_pages(expanded, both)
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_narrow_latent_caches_serve(kv_dtype: torch.dtype, tmp_path: Path) -> None:
    from quire.worker.models.choice import choose_model
    from quire.worker.models.transformers.bridge import TransformersModel

    path = make(tmp_path, "deepseek_v2")
    ops = kernels.select_ops("cpu", torch.float32, kv_dtype=kv_dtype)
    model = TransformersModel.load(choose_model(path), ops, "cpu")  # type: ignore[arg-type]
    assert model.kv_bytes_per_block(16) == 3 * 16 * (32 * kv_dtype.itemsize + (4 if kv_dtype is torch.int8 else 0))
    outputs = generate(make_engine(model), prompts()[:4], GREEDY)
    assert all(len(choices[0]) > 0 for choices in outputs)


class Expanding(nn.Module):
    """An attention module with the parts of MLA. scale: of the keys, 1 as `LatentHeads` assumes."""

    kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim = 24, 8, 16

    def __init__(self, scale: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.kv_b_proj, self.scale = nn.Linear(24, 2 * (16 + 16), bias=bias), scale

    def expand_kv(self, latents: torch.Tensor, positional: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.kv_b_proj(latents).view(1, latents.shape[2], 2, 32).transpose(1, 2)
        keys, values = both.split([16, 16], dim=-1)
        return torch.cat([keys * self.scale, positional.expand(1, 2, -1, -1)], dim=-1), values


SHAPE = AttentionShape(2, 2, 24, 16, 0.2, 0)


@pytest.mark.parametrize(
    ("module", "shape", "is_found"),
    [
        (Expanding(), SHAPE, True),
        (Expanding(scale=2.0), SHAPE, False),
        (Expanding(bias=True), SHAPE, False),
        (Expanding(), AttentionShape(2, 2, 32, 16, 0.2, 0), False),  # the keys have more than these parts
        (Expanding(), AttentionShape(2, 2, 24, 16, 0.2, 0, softcap=5.0), False),
        (Expanding(), AttentionShape(2, 2, 24, 16, 0.2, 0, shared_with=0), False),
        (nn.Linear(2, 2), SHAPE, False),
    ],
)
def test_only_modules_that_expand_as_expected_get_a_latent_cache(
    module: nn.Module, shape: AttentionShape, is_found: bool
) -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    layers, [found] = find_latent_layers(ops, [module.requires_grad_(False)], [shape], set())
    assert bool(layers) == is_found == (found.latent is not None)
    if is_found:
        assert found.latent is not None
        assert (found.latent.value_dim, found.latent.width) == (32, 48)


def test_a_projection_whose_weight_is_read_elsewhere_stays_expanded() -> None:
    module = Expanding().requires_grad_(False)
    ops = kernels.select_ops("cpu", torch.float32)
    assert find_latent_layers(ops, [module], [SHAPE], {module.kv_b_proj}) == ([], [SHAPE])

"""Models that Transformers computes: names, weights, linear layers, hidden states, caches."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quire import kernels
from quire.worker.engine.offline import generate
from quire.worker.models.files.loader import WEIGHTS
from quire.worker.models.transformers import trial as transformers_trial
from quire.worker.models.transformers.config import read_transformers_config
from quire.worker.models.transformers.hidden import HiddenStates
from quire.worker.models.transformers.linear import LinearUses, PackedLinearModule, pack
from quire.worker.models.transformers.weights import load_weights, nbytes_of
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import GREEDY, MAX_TOKENS, by_hugging_face, load, make_engine, prompts, refusal
from tests.support.selection import one_in
from tests.support.transformers_checkpoints import LLAMA_LIKE, change, make_kind, make_other
from tests.support.vision_checkpoints import OTHERS, OWN, make_vision
from tests.worker.engine.features.test_pooling import by_engine, by_transformers, vectors

# Fields of config.json files on the Hugging Face Hub, which differ from those that Transformers writes.
HUB = {
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "internlm3": {"architectures": ["InternLM3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_internlm3.X"}},
    "deepseek-v3": {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
}


@pytest.mark.parametrize("kind", HUB)
@pytest.mark.slow
def test_names_of_the_hub_are_computed_as_what_they_are(kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    expected = by_hugging_face(path)
    change(path, **HUB[kind])
    assert [choices[0] for choices in generate(make_engine(load(path)), prompts(), GREEDY)] == expected


@pytest.mark.slow
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
@pytest.mark.slow
def test_layers_have_caches_of_their_own_shapes(kind: str, widths: list[tuple[int, int]], tmp_path: Path) -> None:
    model = load(make_kind(tmp_path / kind, kind))
    cache = model.alloc_kv_cache(3, 16)
    assert [(keys.shape[1], keys.shape[3]) for keys, _ in cache.layers] == widths
    assert sum(part.nbytes for layer in cache.layers for part in layer) == 3 * model.kv_bytes_per_block(16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_in(6, [*OTHERS, *OWN]))
def test_towers_are_not_kept_in_memory(kind: str, tmp_path: Path) -> None:
    model = load(make_vision(tmp_path / kind, kind))._model
    names = [name for name, _ in model.named_parameters()]
    assert names
    assert not [name for name in names if re.search("vis|projector|connector|audio|vqmodel", name)]


def test_bytes_are_reported_and_tied_weights_count_once(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    path = make_kind(tmp_path / "gpt2", "gpt2")
    model = load_weights(read_transformers_config(path), torch.float32, lambda *one: reports.append(one))
    assert reports[-1] == (nbytes_of([*model.parameters()]),) * 2
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert nbytes_of([table, head]) == table.nbytes


def test_weights_that_are_missing_infinite_or_pickled_are_refused(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    tensors = load_file(path / WEIGHTS)
    name = "transformer.h.1.mlp.c_fc.weight"
    without = {key: value for key, value in tensors.items() if key != name}
    save_file(without, path / WEIGHTS, {"format": "pt"})
    assert f"1 tensors are missing: {name}" in refusal(path)
    tensors[name][0, 0] = float("inf")
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    assert f"tensor {name} has values that are not finite as float32; take another --dtype, or" in refusal(path)
    save_file(tensors | {name: tensors[name].to(torch.int32)}, path / WEIGHTS, {"format": "pt"})
    assert "has the type I32" in refusal(path)
    (path / WEIGHTS).unlink()
    (path / "pytorch_model.bin").write_bytes(b"x")
    assert "pickle format" in refusal(path)


def test_a_layer_in_two_places_is_packed_once_and_one_of_another_type_is_left() -> None:
    shared, exact, head = nn.Linear(32, 32), nn.Linear(32, 4).double(), nn.Linear(32, 8, bias=False)
    model: Any = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, exact), "head": head})
    model.get_output_embeddings = lambda: head
    x = torch.randn(3, 32).bfloat16()
    shared.bfloat16(), head.bfloat16()
    expected = shared(x)
    pack(model, kernels.select_ops("cpu", torch.bfloat16, "reference"))
    assert isinstance(model["a"][0], PackedLinearModule)
    assert model["a"][0] is model["b"][0]
    assert model["b"][1] is exact
    torch.testing.assert_close(model["a"](x), expected, rtol=0.02, atol=0.02)
    assert model["head"](x).dtype is torch.float32


class Reader(nn.Module):
    """Uses each of its layers in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.called, self.asked, self.unused, self.both, self.bias_read = (nn.Linear(32, 32) for _ in range(5))
        self.read = nn.Linear(32, 32, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.called(self.embedding(ids))
        x = self.asked(x.to(self.asked.weight.dtype).to(self.asked.weight.device))
        x = x @ self.read.weight.type(torch.float32).T
        x = self.both(x) * torch.cat([self.both.weight, self.both.weight]).mean()
        x = self.bias_read(x) + self.bias_read.bias
        return self.head(self.experts[1](x))

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_a_layer_whose_weight_is_read_is_left_to_torch() -> None:
    model, ids = Reader(), torch.arange(8)
    before = dict(model.named_parameters(remove_duplicate=False))
    expected = model(ids)
    with torch.inference_mode(), LinearUses(model) as uses:
        torch.testing.assert_close(model(ids), expected)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    model.requires_grad_(False)
    pack(model, kernels.select_ops("cpu", torch.float32, "reference"), None, uses.unpackable())
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinearModule)}
    assert packed == {"called", "asked", "experts.0", "experts.1", "experts.2", "head"}
    assert set(uses.left_to_torch(model)) == {model.read, model.both, model.bias_read}
    torch.testing.assert_close(model(ids), expected)


@pytest.mark.usefixtures("cpu_kernels")
def test_a_model_with_such_a_layer_does_not_promise_equal_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    path = make_kind(tmp_path / "gpt2", "gpt2")
    assert load(path).is_row_invariant
    expected = transformers_trial.over_pages(load(path), transformers_trial.texts(VOCAB_SIZE, 256))

    def written_out(self: Any, hidden: Any) -> Any:
        return self.c_proj(self.act(hidden @ self.c_fc.weight + self.c_fc.bias))

    monkeypatch.setattr(GPT2MLP, "forward", written_out)
    model = load(path)
    assert not model.is_row_invariant
    assert isinstance(model._model.transformer.h[0].mlp.c_proj, PackedLinearModule)
    found = transformers_trial.over_pages(model, transformers_trial.texts(VOCAB_SIZE, 256))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "opt", "gemma3", "cohere2", "qwen3-moe"])
def test_embeddings_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path, kind)
    model = load(path)
    assert model.hidden_size > 0
    for pooling in ("last", "mean"):
        found = vectors(by_engine(model, pooling, budget=50))
        for one, other in zip(found, by_transformers(path, pooling, torch.float32), strict=True):
            assert (one - other).abs().max() < 1e-4 * other.abs().max()


class Body(nn.Module):
    def forward(self, output: Any) -> Any:
        return output


@pytest.mark.parametrize("output", [(torch.ones(1, 3, 2),), SimpleNamespace(last_hidden_state=torch.ones(3, 2)), None])
def test_another_output_is_refused(output: Any) -> None:
    body = Body()
    with HiddenStates(body) as hidden:
        body(output)
    with pytest.raises(RuntimeError, match="no hidden states"):
        hidden.rows(torch.tensor([0]))

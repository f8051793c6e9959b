"""The logits after a prompt, for scores: exact with any chunks, batch, preemption and runner; those of Transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.shared.process.errors import CheckpointError
from quire.shared.protocol.messages import SCORE, GenerationRequest, StepItem
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.paged_model import PagedModel
from quire.worker.models.choice import choose_model, load_model
from tests.support.checkpoints import COMMON, FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.support.mock_model import make_engine, request, run
from tests.support.transformers_checkpoints import KINDS

LENGTHS = (40, 7, 1, 120, 33)
TOKENS = (9, 90, 3)


def score(
    name: str, prompt: Iterable[int], tokens: tuple[int, ...] = TOKENS, model: str = "mock", salt: str = ""
) -> GenerationRequest:
    asked = request(name, prompt, salt, max_tokens=1)
    return GenerationRequest(asked.id, model, asked.prompt, asked.sampling, salt, pooling=SCORE, score_tokens=tokens)


def logits_in(items: list[StepItem], name: str) -> list[float]:
    """Return the logits in the only item of a request."""
    [item] = [item for item in items if item.request_id == name]
    assert (item.start, item.deltas) == (0, ())
    assert item.outcome is not None
    assert item.outcome.name == "stop"
    assert item.outcome.embedding is not None
    return torch.frombuffer(bytearray(item.outcome.embedding), dtype=torch.float32).tolist()


def test_a_cached_beginning_is_not_computed_again() -> None:
    engine = make_engine(prefix_caching=True)
    model: Any = engine.runner.model
    query = tuple(range(5, 37))
    found, computed = {}, {}
    for name, prompt in {"first": (*query, 1, 2), "second": (*query, 3), "again": (*query, 1, 2)}.items():
        before = model.num_computed
        engine.add(score(name, prompt, tuple(range(40))))
        found[name] = logits_in(run(engine), name)
        computed[name] = model.num_computed - before
    assert computed == {"first": 34, "second": 1, "again": 2}
    assert found["first"] == found["again"] != found["second"]


def test_prompts_that_arrive_together_compute_their_common_beginning_once() -> None:
    """The documents of a query are requests of their own, which a worker takes at the same time."""
    query, count = tuple(range(5, 37)), 12
    expected = {}
    for index in range(count):
        engine = make_engine(prefix_caching=True)
        engine.add(score(str(index), (*query, index, index)))
        expected[index] = logits_in(run(engine), str(index))
    engine = make_engine(prefix_caching=True, max_num_seqs=count, num_blocks=100, max_num_batched_tokens=400)
    engine.add(request("answer", (1, 2, 3), max_tokens=5, ignore_eos=True))
    for index in range(count):
        engine.add(score(str(index), (*query, index, index)))
    items = run(engine)
    assert {index: logits_in(items, str(index)) for index in range(count)} == expected
    model: Any = engine.runner.model
    assert model.num_computed == 3 + 4 + 32 + 2 * count  # the answer, the query and the documents
    # Without a cache nothing waits.
    engine = make_engine(max_num_seqs=count, num_blocks=200, max_num_batched_tokens=500)
    for index in range(count):
        engine.add(score(str(index), (*query, index, index)))
    assert len(engine.step()) == count


@pytest.mark.parametrize(("tokens", "message"), [((10**6,), "outside the vocabulary"), ((-1,), "vocabulary")])
def test_tokens_outside_of_the_vocabulary_are_refused_alone(tokens: tuple[int, ...], message: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefused, match=message):
        engine.add(score("bad", (5, 6), tokens))
    engine.add(score("good", (5, 6)))
    assert len(logits_in(run(engine), "good")) == len(TOKENS)


# --- real models ------------------------------------------------------------------------------------------------------


def random_prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()) for length in LENGTHS]


def by_engine(model: PagedModel, tokens: tuple[int, ...], budget: int = 50, together: bool = True) -> torch.Tensor:
    """Return the logits after each prompt, in steps of at most `budget` tokens, next to an answer that decodes."""
    limits = EngineLimits(60, 8, 8, budget, model.max_model_len, prefix_caching=False)
    engine = Engine(model, limits, (), None)
    engine.checks_itself = True
    items: list[StepItem] = []
    if together:
        engine.add(request("answer", (5, 6, 7), max_tokens=40, temperature=0.0, ignore_eos=True))
    for index, prompt in enumerate(random_prompts()):
        engine.add(score(str(index), prompt, tokens))
        if not together:
            items += run(engine)
    items += run(engine)
    return torch.tensor([logits_in(items, str(index)) for index in range(len(LENGTHS))])


def load(folder: Path, impl: str, dtype: torch.dtype, bits: int | str = 0) -> PagedModel:
    ops = kernels.select_ops("cpu", dtype)
    return load_model(folder, choose_model(folder, impl), ops, torch.device("cpu"), 256, bits=bits)


def by_transformers(model: Any) -> torch.Tensor:
    """Return the logits after each prompt: of labels, or of all tokens."""
    with torch.inference_mode():
        rows = [model(torch.tensor([prompt])).logits[0].float() for prompt in random_prompts()]
    return torch.stack([row if row.dim() == 1 else row[-1] for row in rows])


def make_classifier(folder: Path, name: str, fields: dict[str, Any], labels: int = 1, std: float = 0.3) -> Any:
    """Write a random checkpoint of a class for sequence classification, and return its model."""
    import transformers

    model_class = getattr(transformers, f"{name}ForSequenceClassification")
    config = model_class.config_class(**(COMMON | fields | {"num_labels": labels, "pad_token_id": 0}))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = model_class(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=std) if parameter.dim() > 1 else torch.nn.init.uniform_(parameter)
    model.save_pretrained(folder)
    return model


# Class without the suffix, and fields besides COMMON; computed by Quire's own decoder, or by Transformers alone.
OWN = {
    "Llama": FAMILIES["llama"][1],
    "Mistral": FAMILIES["mistral"][1],
    "Qwen2": FAMILIES["qwen2"][1],
    "Qwen3": FAMILIES["qwen3"][1],
    "Gemma2": FAMILIES["gemma2"][1],
    "Gemma3Text": FAMILIES["gemma3"][1],
    "Mixtral": FAMILIES["mixtral"][1],
}
BRIDGED = {"Gemma": KINDS["gemma"][1], "GPT2": KINDS["gpt2"][1], "GPTNeoX": KINDS["gpt-neox"][1], "Qwen3": {}}


@pytest.mark.parametrize(
    ("name", "impl", "implementation"),
    [*((name, "auto", "quire") for name in OWN), *((name, "transformers", "transformers") for name in BRIDGED)],
)
def test_heads_for_labels_give_the_numbers_of_transformers(
    name: str, impl: str, implementation: str, tmp_path: Path
) -> None:
    expected = by_transformers(make_classifier(tmp_path, name, (OWN if impl == "auto" else BRIDGED)[name], labels=3))
    model = load(tmp_path, impl, torch.float32)
    assert model.implementation == implementation
    found = by_engine(model, (0, 1, 2))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    # A label beyond the head is no token that could be drawn.
    assert by_engine(model, (3,), together=False).max() == -torch.inf


@pytest.mark.parametrize("impl", ["quire", "transformers"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_tokens_of_a_causal_model_have_the_logits_of_transformers(family: str, impl: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path, family)
    expected = by_transformers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))[:, list(TOKENS)]
    found = by_engine(load(folder, impl, torch.float32), TOKENS)
    assert (found - expected).abs().max() < 1e-3


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 0), (torch.float32, 8), (torch.bfloat16, "fp8")])
def test_rounded_scores_order_documents_as_exact_ones_do(dtype: torch.dtype, bits: int | str, tmp_path: Path) -> None:
    expected = by_transformers(make_classifier(tmp_path, "Qwen3", OWN["Qwen3"], std=0.1))[:, 0]
    found = by_engine(load(tmp_path, "quire", dtype, bits), (0,))[:, 0]
    assert (found - expected).abs().max() < 0.1 * (expected.max() - expected.min())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_do_not_depend_on_the_batch_and_chunks(dtype: torch.dtype, tmp_path: Path) -> None:
    try:
        kernels.CpuOps(dtype)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))  # plain torch adds in another order in other batches
    make_classifier(tmp_path, "Qwen3", OWN["Qwen3"])
    model = load(tmp_path, "quire", dtype)
    alone = by_engine(model, (0,), budget=200, together=False)
    assert by_engine(model, (0,), budget=9).equal(alone)
    assert by_engine(model, (0,), budget=64).equal(alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertForSequenceClassification"], "model_type": "bert"}, "no.* one linear layer"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures"),
        ({"id2label": {str(index): str(index) for index in range(VOCAB_SIZE + 1)}}, "at most vocab_size labels"),
    ],
)
def test_other_heads_are_refused_with_the_reason(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_classifier(tmp_path, "Llama", {})
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, "auto", torch.float32)


def test_a_checkpoint_without_its_head_is_refused_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        load(folder, "quire", torch.float32)

"""Requests with adapters get the tokens of merged checkpoints, in any batch, out of the prefix cache, and preempted."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import kernels
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.adapters import Adapters
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.offline import generate
from quire.worker.models.native.decoder import Decoder
from tests.support.adapters import merge_adapter, write_adapter
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint

MAX_TOKENS = 12
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"seed": 1, "size": 1.0},
    "rs": {"seed": 2, "rank": 8, "use_rslora": True, "targets": ("q_proj", "v_proj"), "size": 1.0},
    "mixed": {
        "seed": 3,
        "rank_pattern": {"up_proj": 6, r"layers\.(0|2)\.self_attn\..*": 2},
        "alpha_pattern": {"up_proj": 3, "^model.layers.1.self_attn.q_proj": 20},
        "size": 1.0,
    },
    "wide": {"seed": 4, "rank": 16, "targets": r".*\.[02]\.mlp\.(gate|down)_proj", "size": 1.0},
    "dora": {"seed": 6, "use_dora": True, "modules_to_save": ["norm"], "size": 1.0},
    "tokens": {"seed": 7, "targets": ("v_proj",), "trainable_token_indices": list(range(0, 200, 3)), "size": 1.0},
    "layer": {"seed": 5, "targets": ("o_proj", "mlp.up_proj"), "layers_to_transform": [1], "size": 1.0},
}

# PEFT cannot merge it into tied weights.
ENDS = {"targets": ("v_proj", "embed_tokens", "lm_head"), "use_dora": True, "size": 1.0}


def prompts(count: int = 16) -> list[tuple[int, ...]]:
    draw = random.Random(5)
    lengths = [1, 2, 15, 16, 17, 60, *(draw.randint(3, 50) for _ in range(count - 6))]
    return [tuple(draw.randrange(VOCAB_SIZE - 3) for _ in range(length)) for length in lengths]


def make_engine(path: Path, prefer: str = "auto", bits: int = 0, **limits: Any) -> Engine:
    ops = kernels.select_ops("cpu", torch.float32, prefer)
    model = Decoder.load(path, ops, torch.float32, "cpu", bits=bits)
    sizes = {"num_blocks": 200, "block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 64} | limits
    engine = Engine(model, EngineLimits(max_model_len=model.max_model_len, **sizes), model.config.eos_token_ids, None)
    engine.adapters.limit = 8
    engine.checks_itself = True
    return engine


@pytest.fixture(
    scope="module",
    params=[
        "qwen3",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("llama-bias", marks=pytest.mark.soak),
        pytest.param("gemma2", marks=pytest.mark.soak),
    ],
)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A checkpoint, adapters for it, and the greedy outputs of the checkpoint merged with each."""
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(folder / "base", request.param)
    adapters = {name: write_adapter(folder / name, base, **fields) for name, fields in ADAPTERS.items()}
    merged = {name: merge_adapter(base, path, folder / f"{name}-merged") for name, path in adapters.items()}
    adapters["ends"] = write_adapter(folder / "ends", base, **ENDS)
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    outputs = {
        name: [choices[0] for choices in generate(make_engine(path), prompts(), greedy)]
        for name, path in ({"": base} | merged).items()
    }
    return SimpleNamespace(base=base, adapters=adapters, merged=merged, outputs=outputs)


def load(engine: Engine, files: SimpleNamespace) -> None:
    for name, path in files.adapters.items():
        engine.adapters.add(engine.runner.model.load_adapter(name, path, 64))


def run(engine: Engine, asked: list[tuple[tuple[int, ...], str]], **params: Any) -> list[list[int]]:
    """Run requests of prompt and adapter together, and return their tokens."""
    sampling = SamplingParams(**({"max_tokens": MAX_TOKENS, "temperature": 0.0} | params))
    for number, (prompt, adapter) in enumerate(asked):
        engine.add(GenerationRequest(str(number), "m", prompt, sampling, adapter=adapter))
    outputs: list[list[int]] = [[] for _ in asked]
    while engine.has_work:
        for item in engine.step():
            for delta in item.deltas:
                outputs[int(item.request_id)].extend(delta.token_ids)
    return outputs


def test_merged_checkpoints_differ_from_their_base(files: SimpleNamespace) -> None:
    texts = {name: str(tokens) for name, tokens in files.outputs.items()}
    assert len(set(texts.values())) == 1 + len(ADAPTERS)


@pytest.mark.slow
@pytest.mark.parametrize("prefer", ["auto", "reference"])
def test_one_batch_of_several_adapters_and_none_equals_merged_checkpoints(files: SimpleNamespace, prefer: str) -> None:
    engine = make_engine(files.base, prefer)
    load(engine, files)
    names = ["", *ADAPTERS]
    asked = [(prompt, names[at % len(names)]) for at, prompt in enumerate(prompts())]
    expected = [files.outputs[name][at] for at, (_, name) in enumerate(asked)]
    assert run(engine, asked) == expected
    # The prefix cache now has all prompts. Shifted by one, each belongs to another adapter.
    asked = [(prompt, names[(at + 1) % len(names)]) for at, prompt in enumerate(prompts())]
    hits = engine.groups.blocks.counters.prefix_hits
    assert run(engine, asked) == [files.outputs[name][at] for at, (_, name) in enumerate(asked)]
    assert engine.groups.blocks.counters.prefix_hits == hits
    assert run(engine, asked) == [files.outputs[name][at] for at, (_, name) in enumerate(asked)]
    assert engine.groups.blocks.counters.prefix_hits > hits


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_keep_their_adapters(files: SimpleNamespace, preemption: str) -> None:
    engine = make_engine(
        files.base, num_blocks=20, num_host_blocks=20, preemption=preemption, max_num_batched_tokens=32
    )
    load(engine, files)
    names = ["", *ADAPTERS]
    asked = [(prompt, names[at % len(names)]) for at, prompt in enumerate(prompts())]
    assert run(engine, asked) == [files.outputs[name][at] for at, (_, name) in enumerate(asked)]
    assert engine.groups.num_preemptions > 0


@pytest.mark.parametrize("name", ["plain", "dora", "ends"])
def test_a_request_has_the_same_bits_in_any_batch(files: SimpleNamespace, name: str, cpu_kernels: None) -> None:
    def logprobs(asked: list[tuple[tuple[int, ...], str]]) -> bytes:
        engine = make_engine(files.base, prefix_caching=False)
        load(engine, files)
        sampling = SamplingParams(MAX_TOKENS, temperature=1.0, seed=7, logprobs=True, top_logprobs=5, ignore_eos=True)
        for number, (prompt, adapter) in enumerate(asked):
            engine.add(GenerationRequest(str(number), "m", prompt, sampling, adapter=adapter))
        found = b""
        while engine.has_work:
            for item in engine.step():
                if item.request_id == "0":
                    found += b"".join(bytes(delta.logprobs or b"") for delta in item.deltas)
        return found

    mine = prompts()[5], name
    alone = logprobs([mine])
    others = list(zip(prompts(), ["rs", "", "layer", "wide", "dora", "ends", "plain", "mixed"] * 2, strict=True))
    assert alone == logprobs([mine, *others]) != b""


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_weights_with_an_adapter_follow_it(files: SimpleNamespace, bits: int) -> None:
    """The low-rank part is added to products of quantised weights, so the text is far from that of the base."""
    base, merged = make_engine(files.base, bits=bits), make_engine(files.merged["plain"], bits=bits)
    load(base, files)
    prompt = prompts()[5]

    def first_logprobs(engine: Engine, adapter: str) -> torch.Tensor:
        captured = []
        forward = engine.runner.model.forward
        engine.runner.model.forward = lambda *args: captured.append(forward(*args)) or captured[-1]  # type: ignore[method-assign,func-returns-value]
        run(engine, [(prompt, adapter)], max_tokens=1)
        return torch.log_softmax(captured[-1][0], dim=-1)

    adapted, of_merged, without = (
        first_logprobs(base, "plain"), first_logprobs(merged, ""), first_logprobs(base, ""),
    )  # fmt: skip
    assert (adapted - of_merged).abs().mean() < 0.5 * (without - of_merged).abs().mean()


def test_a_running_request_keeps_an_adapter_that_is_unloaded(files: SimpleNamespace) -> None:
    engine = make_engine(files.base)
    load(engine, files)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    engine.add(GenerationRequest("0", "m", prompts()[3], sampling, adapter="plain"))
    engine.step()
    engine.adapters.remove("plain")
    tokens: list[int] = []
    with pytest.raises(RequestRefused, match="does not hold the adapter 'plain'"):
        engine.add(GenerationRequest("1", "m", prompts()[3], sampling, adapter="plain"))
    engine.drop("none")
    engine.add(GenerationRequest("2", "m", prompts()[4], sampling))
    while engine.has_work:
        tokens += [
            token for item in engine.step() if item.request_id == "0" for d in item.deltas for token in d.token_ids
        ]
    assert files.outputs["plain"][3][-len(tokens) :] == tokens
    assert engine.input_batch.num_adapted == 0


def test_forked_choices_use_the_adapter(files: SimpleNamespace) -> None:
    engine = make_engine(files.base)
    load(engine, files)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=3)
    engine.add(GenerationRequest("0", "m", prompts()[5], sampling, adapter="mixed"))
    choices: dict[int, list[int]] = {}
    while engine.has_work:
        for item in engine.step():
            for delta in item.deltas:
                choices.setdefault(delta.choice, []).extend(delta.token_ids)
    assert list(choices.values()) == [files.outputs["mixed"][5]] * 3


def adapter(name: str, digest: str = "d") -> Any:
    return SimpleNamespace(name=name, digest=digest, nbytes=10)


def test_the_number_of_adapters_is_bounded() -> None:
    adapters = Adapters(2)
    adapters.add(adapter("a"))
    adapters.add(adapter("b"))
    adapters.add(adapter("a", "other"))
    assert adapters.held == (("a", "other"), ("b", "d"))
    assert adapters.nbytes == 20
    with pytest.raises(RequestRefused, match="'c' would be number 3, and --max-loras is 2"):
        adapters.add(adapter("c"))
    adapters.remove("b")
    adapters.add(adapter("c"))
    assert adapters.held == (("a", "other"), ("c", "d"))
    adapters.max_bytes = 20
    adapters.add(adapter("c", "again"))
    adapters.max_bytes = 19
    with pytest.raises(RequestRefused, match="'c' has 10 bytes, the others have 10, and --max-lora-gb is 1"):
        adapters.add(adapter("c"))


def test_a_request_for_other_files_is_refused() -> None:
    adapters = Adapters(1)
    adapters.add(adapter("a"))
    assert adapters.find("a") is adapters.find("a", "d")
    with pytest.raises(RequestRefused, match="'a' of this worker has the digest d, and the request was accepted for e"):
        adapters.find("a", "e")

"""The engine that looks ahead gives what Hugging Face gives, token for token, in float32.

On a CUDA device the tests use the Triton kernels, with and without graphs. Without a device they run on the CPU, where
a graph is a call that reads the same static buffers: this covers everything except the device itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.shared.protocol.messages import SamplingParams
from quire.worker.device.cuda.graph_capture import graph_buckets
from quire.worker.device.cuda.graphs import record_on_cuda
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.in_flight import InFlightStep
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import complete, generate
from quire.worker.engine.paged_model import PagedModel
from quire.worker.engine.step import Step
from quire.worker.models.choice import choose_model
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.transformers.bridge import TransformersModel
from quire.worker.models.transformers.config import TransformersConfig
from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.support.kernels.implementations import LONG_WITHOUT_GPU, ON_CUDA
from tests.support.mock_model import record
from tests.support.parity import MAX_TOKENS, by_hugging_face, prompts
from tests.support.transformers_checkpoints import make_kind

# Families that Quire computes itself, and some that Transformers computes.
TRIED = ("llama3-rope", "mistral", "qwen3", "gpt2", "gemma3", "deepseek-v3", "qwen3-moe")
GRAPHS = [False, True]
# Without a device, CI tries two of the families.
IN_CI = TRIED if ON_CUDA else ("qwen3", "gpt2")
FAMILIES_TRIED = [pytest.param(one, marks=() if one in IN_CI else pytest.mark.soak) for one in TRIED]
# Parameters that need the logits of a step, or the tokens before it.
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 3},
    {"logit_bias": ((5, 3.0), (9, -100.0)), "min_tokens": 4, "allowed_token_ids": tuple(range(0, 100, 3))},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
]


def make_engine(path: Path, graphs: bool, **limits: object) -> Engine:
    device = torch.device("cuda", torch.cuda.current_device()) if ON_CUDA else torch.device("cpu")
    # The reference runs with graphs: the C++ kernels do not support a graph's padding tokens, which have no sequence.
    ops = (
        kernels.triton_ops(device, torch.float32)
        if ON_CUDA
        else kernels.select_ops("cpu", torch.float32, "reference" if graphs else "auto")
    )
    config = choose_model(path)
    model: PagedModel = (
        TransformersModel.load(config, ops, device)
        if isinstance(config, TransformersConfig)
        else Decoder.load(path, ops, torch.float32, device)
    )
    sizes = {"num_blocks": 200, "block_size": 8, "max_num_seqs": 12, "max_num_batched_tokens": 32}
    chosen = EngineLimits(**(sizes | {"max_model_len": model.max_model_len} | limits))  # type: ignore[arg-type]
    buckets = graph_buckets(chosen.max_num_seqs, chosen.max_num_batched_tokens) if graphs else []
    runner = partial(DeviceRunner, graph_buckets=buckets, record=record_on_cuda if ON_CUDA else record)
    engine = Engine(model, chosen, model.config.eos_token_ids, None, runner=runner)
    while engine.prepare():
        pass
    engine.checks_itself = True
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_greedy_outputs_equal_those_of_hugging_face(family: str, graphs: bool, tmp_path: Path) -> None:
    path = (make_checkpoint if family in FAMILIES else make_kind)(tmp_path / family, family)
    engine = make_engine(path, graphs)
    outputs = generate(engine, prompts(), SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
    assert [choices[0] for choices in outputs] == by_hugging_face(path)
    assert engine.scheduler.blocks.num_free == engine.limits.num_blocks


@pytest.mark.skipif(not ON_CUDA, reason="only a CUDA device can be waited for")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_launching_a_step_waits_for_nothing(
    temperature: float, kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If penalties need the tokens of the previous step, the launch waits for their event. This is no error here."""
    # The last bits of a row depend on how much of its prompt is cached, and one of the 512 draws depends on them.
    engine = make_engine(make_checkpoint(tmp_path / "llama", "llama"), True, prefix_caching=False)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, **KINDS[kind])
    expected = generate(engine, prompts(), params)
    launch, launched = engine._launch, []

    def watched(step: Step) -> tuple[Step, InFlightStep | None]:
        launched.append(step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine, "_launch", watched)
    assert generate(engine, prompts(), params) == expected
    assert any(step.chunks for step in launched)
    assert any(not step.chunks for step in launched)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_choices_equal_hugging_face(preemption: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "llama", "llama")
    engine = make_engine(path, ON_CUDA, num_blocks=40, num_host_blocks=200, preemption=preemption)
    outputs = generate(engine, prompts(), SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=3))
    assert engine.groups.num_preemptions > 0
    assert outputs == [[expected] * 3 for expected in by_hugging_face(path)]


def test_drawn_texts_are_those_of_an_engine_that_waits_for_every_step(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "llama", "llama", initializer_range=0.1)
    params = [
        SamplingParams(max_tokens=24, temperature=i % 3 / 2, top_p=0.95, seed=i, **KINDS[i % len(KINDS)])
        for i in range(32)
    ]
    ahead = make_engine(path, ON_CUDA)
    waits = make_engine(path, False)
    waits.runner.looks_ahead = False
    assert generate(ahead, prompts(), params) == generate(waits, prompts(), params)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", GRAPHS)
def test_log_probabilities_are_those_of_hugging_face(graphs: bool, tmp_path: Path) -> None:
    """The scored requests are sampled, among greedy requests, for whose tokens the host does not wait."""
    import transformers

    path = make_checkpoint(tmp_path / "llama", "llama", initializer_range=0.1)
    engine, asked = make_engine(path, graphs), prompts()[:8]
    plain = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    scored = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, seed=3, n=2, logprobs=True, top_logprobs=4)
    found = complete(engine, asked, [scored if i % 4 == 0 else plain for i in range(len(asked))])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for i, (prompt, choices) in enumerate(zip(asked, found, strict=True)):
        assert [len(one.logprobs) for one in choices] == [len(one.token_ids) if i % 4 == 0 else 0 for one in choices]
        for one in choices if i % 4 == 0 else ():
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *one.token_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits.double(), dim=-1)
            own = [logprobs.logprob for logprobs in one.logprobs]
            assert own == pytest.approx(
                expected.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0].tolist(), abs=1e-3
            )
            top = torch.tensor([[logprob for _, logprob in logprobs.top] for logprobs in one.logprobs])
            assert top.double().numpy() == pytest.approx(expected.topk(4).values.numpy(), abs=1e-3)


# Without a device, tests/worker/ranks has more cases.
@LONG_WITHOUT_GPU
def test_ranks_give_what_hugging_face_gives(tmp_path: Path) -> None:
    """On a machine with one card there is one rank, which still does every exchange between ranks, also in graphs."""
    path = make_checkpoint(tmp_path / "qwen3", "qwen3")
    command = [sys.executable, "-m", "tests.gpu.on_ranks", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [choices[0] for choices in found["outputs"]] == by_hugging_face(path)
    assert found["graphs"] == found["buckets"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(ON_CUDA, reason="the ranks run on the GPUs themselves")
def test_ranks_on_two_simulated_devices_give_what_hugging_face_gives(tmp_path: Path) -> None:
    """Both processes capture the same graphs, whose exchanges are in the order of the streams."""
    pytest.importorskip("triton", reason="Triton is not installed")
    path = make_checkpoint(tmp_path / "qwen3", "qwen3", num_hidden_layers=1)
    root = Path(__file__).parents[2]
    folders = [root / "tests" / "support" / "simulated_cuda" / "site", root, os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "SIMULATED_CUDA_DEVICES": "2",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.gpu.on_ranks", str(path), "--few"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=root)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == 2
    assert found["graphs"] == found["buckets"] == 5
    assert found["symmetric"]  # small tensors are summed through symmetric memory, in graphs too
    expected = [tokens[:4] for tokens in by_hugging_face(path)[:2]]
    assert [choices[0] for choices in found["outputs"]] == expected

"""Log-probabilities of the engine are those of the model, also after preemption and resumption."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import kernels
from quire.shared.protocol.logprobs import TokenLogprobs, read_prompt_records, read_records
from quire.shared.protocol.messages import Delta, GenerationRequest, SamplingParams, StepItem
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import Completion, complete
from quire.worker.engine.runner import Runner
from quire.worker.engine.scoring import ScoredRows, TokenScores
from quire.worker.engine.sequence import Sequence, SequenceGroup
from quire.worker.models.native.decoder import Decoder
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.mock_model import (
    START,
    VOCAB,
    MockModel,
    advance,
    final,
    graphed,
    log_softmax,
    make_engine,
    request,
    run,
    steps,
)

MAX_TOKENS = 16
TOP = 5


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", initializer_range=0.1)


def prompts() -> list[tuple[int, ...]]:
    draw = random.Random(6)
    return [tuple(draw.randrange(VOCAB_SIZE - 3) for _ in range(length)) for length in (1, 7, 16, 17, 40, 75)]


def engine_of(checkpoint: Path, runner: type[Runner] = Runner, **limits: Any) -> Engine:
    model = Decoder.load(checkpoint, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")
    sizes = {"num_blocks": 200, "block_size": 8, "max_num_seqs": 12, "max_num_batched_tokens": 32}
    engine = Engine(
        model, EngineLimits(**(sizes | {"max_model_len": model.max_model_len} | limits)), (), None, runner=runner
    )
    engine.checks_itself = True
    return engine


def by_hugging_face(checkpoint: Path, asked: list[tuple[tuple[int, ...], Completion]]) -> list[np.ndarray]:
    """Return log(softmax) of the logits of each output token, for each prompt with its output."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    with torch.inference_mode():
        for prompt, one in asked:
            logits = model(torch.tensor([[*prompt, *one.token_ids]])).logits[0]
            found.append(torch.log_softmax(logits[len(prompt) - 1 : -1].double(), dim=-1).numpy())
    return found


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 4},
    "penalised": {"temperature": 1.0, "seed": 5, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    "several": {"temperature": 1.0, "seed": 6, "n": 3},
    "ranked": {"temperature": 1.0, "seed": 7, "n": 2, "best_of": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_hugging_face(checkpoint: Path, kind: str) -> None:
    """Some requests ask for them and some do not, in one batch that is preempted."""
    engine = engine_of(checkpoint, num_blocks=34)
    params = SamplingParams(max_tokens=MAX_TOKENS, logprobs=True, top_logprobs=TOP, **KINDS[kind])
    plain = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    found = complete(engine, prompts() * 2, [params] * len(prompts()) + [plain] * len(prompts()))
    assert engine.groups.num_preemptions > 0
    asked = [(prompt, one) for prompt, choices in zip(prompts(), found, strict=False) for one in choices]
    assert len(asked) == len(prompts()) * params.n
    for (_, one), expected in zip(asked, by_hugging_face(checkpoint, asked), strict=True):
        assert len(one.logprobs) == len(one.token_ids) == MAX_TOKENS
        own = [logprobs.logprob for logprobs in one.logprobs]
        assert own == pytest.approx(expected[np.arange(MAX_TOKENS), list(one.token_ids)], abs=1e-4)
        for logprobs, row in zip(one.logprobs, expected, strict=True):
            token_ids, values = zip(*logprobs.top, strict=True)
            assert values == pytest.approx(np.sort(row)[::-1][:TOP], abs=1e-4)
            assert row[list(token_ids)] == pytest.approx(values, abs=1e-4)
            assert len(set(token_ids)) == TOP
        assert one.score is None or one.score == pytest.approx(np.mean(own), abs=1e-5)
    assert all(one.logprobs == [] for choices in found[len(prompts()) :] for one in choices)


@pytest.mark.usefixtures("cpu_kernels")
def test_the_bits_of_log_probabilities_do_not_depend_on_the_batch(checkpoint: Path) -> None:
    """The kernels for CPUs are always row-invariant."""
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=seed, logprobs=True, top_logprobs=seed)
        for seed in range(len(prompts()))
    ]
    crowd = engine_of(checkpoint, num_blocks=18)
    together = complete(crowd, prompts(), params)
    assert crowd.groups.num_preemptions > 0
    alone = engine_of(checkpoint, max_num_batched_tokens=100)
    assert together == [complete(alone, [prompt], one)[0] for prompt, one in zip(prompts(), params, strict=True)]
    assert [len(choices[0].logprobs[0].top) for choices in together] == list(range(len(prompts())))


@pytest.mark.parametrize("runner", [Runner, DeviceRunner])
def test_scores_of_prompts_are_those_of_hugging_face(checkpoint: Path, runner: type[Runner]) -> None:
    """In one batch with prompts that are only continued, in chunks of any size, with the same bits."""
    asked = [prompt for prompt in prompts() if len(prompt) > 1]
    split = [((prompt[0],), Completion(prompt[1:], "stop", None, [])) for prompt in asked]
    expected = by_hugging_face(checkpoint, split)
    found: dict[int, list[bytes]] = {}
    for tokens in (13, 32, 256):
        engine = engine_of(checkpoint, max_num_batched_tokens=tokens, runner=runner)
        for index, prompt in enumerate(asked):
            params = SamplingParams(max_tokens=0, prompt_logprobs=TOP, returns_prompt=True)
            engine.add(GenerationRequest(f"r{index}", "m", prompt, params))
            engine.add(GenerationRequest(f"plain {index}", "m", prompt, SamplingParams(max_tokens=4, temperature=0.0)))
        reports = {item.request_id: item.report for item in run(engine) if item.request_id[0] == "r" and item.report}
        assert set(reports) == {f"r{index}" for index in range(len(asked))}
        found[tokens] = [reports[f"r{index}"].records or b"" for index in range(len(asked))]
    assert found[13] == found[32] == found[256]
    for records, prompt, rows in zip(found[13], asked, expected, strict=True):
        read = list(read_prompt_records(records, len(prompt) - 1))
        assert [one.logprob for one in read] == pytest.approx(
            [row[i] for row, i in zip(rows, prompt[1:], strict=True)], abs=1e-4
        )
        for one, row, token in zip(read, rows, prompt[1:], strict=True):
            token_ids, values = zip(*one.top, strict=True)
            assert values == pytest.approx(np.sort(row)[::-1][:TOP], abs=1e-4)
            assert row[list(token_ids)] == pytest.approx(values, abs=1e-4)
            closest = np.sort(np.abs(np.delete(row, token) - row[token]))[0]
            assert one.rank == 1 + (row > row[token]).sum() or closest < 1e-4


# --- what becomes of a request ----------------------------------------------------------------------------------------

RUNNERS: dict[str, Any] = {"known": Runner, "launched": DeviceRunner, "replayed": graphed}


@pytest.fixture(params=RUNNERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    return partial(make_engine, True, RUNNERS[request.param])


def read(items: list[StepItem], name: str) -> list[list[TokenLogprobs]]:
    """Return the records of each choice. Checks that each item has the records of its own tokens only."""
    found: dict[int, list[TokenLogprobs]] = {}
    for delta in (delta for item in items if item.request_id == name for delta in item.deltas):
        assert delta.logprobs is not None
        found.setdefault(delta.choice, []).extend(read_records(delta.logprobs, len(delta.token_ids)))
    return [found[choice] for choice in sorted(found)]


def expected(prompt: tuple[int, ...], output: tuple[int, ...], top: int) -> list[TokenLogprobs]:
    model, state, found = MockModel(branches=True), START, []
    for at, token in enumerate((*prompt, *output)):
        if at >= len(prompt):
            row = log_softmax(model.logits_of([state]))[0]
            best = np.argsort(-row, kind="stable")[:top].tolist()
            found.append(TokenLogprobs(float(row[token]), tuple((token_id, float(row[token_id])) for token_id in best)))
        state = advance(state, token)
    return found


def assert_right(items: list[StepItem], name: str, prompt: tuple[int, ...], top: int) -> None:
    for delta, found in zip(final(items, name), read(items, name), strict=True):
        assert found == expected(prompt, delta.token_ids, top)


def test_each_token_has_log_probabilities_in_a_batch_with_requests_without(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add(request("plain", (1, 2, 3), ignore_eos=True))
    steps(engine, 2)
    engine.add(request("few", (4, 5), logprobs=True, temperature=1.0, seed=3))
    engine.add(request("many", (6, 7, 8), logprobs=True, top_logprobs=4, n=2, temperature=1.0, seed=4))
    engine.add(request("stopped", (3, 4), logprobs=True, top_logprobs=1, stop=("q", "x"), max_tokens=40))
    items = run(engine)
    assert_right(items, "few", (4, 5), 0)
    assert_right(items, "many", (6, 7, 8), 4)
    assert_right(items, "stopped", (3, 4), 1)
    assert {delta.logprobs for item in items if item.request_id == "plain" for delta in item.deltas} == {None}


def test_no_more_log_probabilities_are_given_than_the_vocabulary_has_tokens() -> None:
    assert VOCAB > 20
    logits = torch.tensor([[0.0, 1.0, -1.0]])
    found = logprobs_of(logits, [1], tops=[20])
    assert [token_id for token_id, _ in found[0].top] == [1, 0, 2]


def test_tokens_that_cannot_be_drawn_have_the_probability_that_the_model_gives_them() -> None:
    never = float("-inf")
    found = logprobs_of(torch.tensor([[never, 2.0, float("nan")], [0.5, 0.5, 0.5]]), [1, 2], tops=[3, 1])
    assert found[0].logprob == 0.0
    assert found[0].top == ((1, 0.0), (0, never), (2, never))
    assert found[1].top == ((0, pytest.approx(np.log(1 / 3))),)


def scored_sequences(tops: list[int]) -> list[Sequence]:
    sequences = []
    for top in tops:
        group = SequenceGroup("r", (0,), SamplingParams(max_tokens=1, logprobs=True, top_logprobs=top))
        group.start()
        sequences += group.sequences
    return sequences


def scored(logits: torch.Tensor, drawn: list[int], tops: list[int]) -> TokenScores:
    at = np.arange(len(drawn))
    rows = ScoredRows(at, torch.from_numpy(at), logits, np.array(tops, dtype=np.int8))
    return rows.launch(kernels.select_ops("cpu", torch.float32), torch.tensor(drawn, dtype=torch.int32))


def logprobs_of(logits: torch.Tensor, drawn: list[int], tops: list[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities recorded with sequences that got these tokens."""
    sequences = scored_sequences(tops)
    scored(logits, drawn, tops).record(sequences)
    deltas = [Delta(0, (token,), logprobs=one.take_logprobs()) for one, token in zip(sequences, drawn, strict=True)]
    assert all(one.take_logprobs() == b"" for one in sequences)
    return [read_records(delta.logprobs or b"", 1)[0] for delta in deltas]

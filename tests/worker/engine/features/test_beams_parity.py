"""Beam search equals Hugging Face `generate(num_beams=...)`: tokens, reasons and scores, in float32.

All searches of a test run in one engine, together with greedy and sampled requests, and with too few blocks for all.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from quire import kernels
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import Completion, complete
from quire.worker.models.native.decoder import Decoder
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint

MAX_TOKENS = 12
WIDTHS = (2, 3, 4, 6)
EARLY_STOPPING: dict[str, bool | str] = {"false": False, "true": True, "never": "never"}
LENGTH_PENALTIES = (0.0, 0.6, 1.0, 2.0, -1.0)
# Ids that end a text: one, some, and so many that most beams end soon.
END_TOKENS = {"one": (77,), "some": (3, 77, 150, 201), "many": tuple(range(5, 250, 10))}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(tmp_path_factory.mktemp("beams") / "llama", "llama", initializer_range=0.15)


@pytest.fixture(scope="module")
def model(checkpoint: Any) -> Decoder:
    return Decoder.load(checkpoint, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")


@pytest.fixture(scope="module")
def hugging_face(checkpoint: Any) -> Any:
    """Return a function of prompt, params and end tokens that returns the choices and their scores."""
    import transformers

    there = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )

    @cache
    def generate(prompt: tuple[int, ...], params: SamplingParams, end: tuple[int, ...]) -> list[Completion]:
        ids = torch.tensor([prompt])
        out = there.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=EARLY_STOPPING[params.early_stopping],
            repetition_penalty=params.repetition_penalty,
            eos_token_id=list(end),
            pad_token_id=VOCAB_SIZE - 1,
            return_dict_in_generate=True,
            output_scores=True,
        )
        choices = []
        for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
            ends = [at for at, token in enumerate(row) if token in end]
            tokens = tuple(row[: ends[0] + 1]) if ends else tuple(row)
            choices.append(Completion(tokens, "stop" if ends else "length", score, []))
        return choices

    return generate


def make_engine(model: Decoder, end: tuple[int, ...], **limits: Any) -> Engine:
    roomy = {
        "num_blocks": 400,
        "block_size": 8,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 64,
        "max_model_len": model.max_model_len,
    }
    engine = Engine(model, EngineLimits(**(roomy | limits)), end, None)
    engine.checks_itself = True
    return engine


def searches(shift: int) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Return every early_stopping with every length penalty. The widths alternate, beginning at `shift`."""
    draw = random.Random(shift)
    found = []
    for i, (early, penalty) in enumerate((e, p) for e in EARLY_STOPPING for p in LENGTH_PENALTIES):
        width = WIDTHS[(i + shift) % len(WIDTHS)]
        prompt = tuple(draw.randrange(VOCAB_SIZE - 3) for _ in range(draw.choice([1, 7, 8, 9, 21])))
        params = SamplingParams(
            MAX_TOKENS,
            n=draw.randint(1, width),
            temperature=0.0,
            beam_width=width,
            length_penalty=penalty,
            early_stopping=early,
        )
        found.append((prompt, params))
    return found


def others() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Return the greedy and sampled requests that run together with the searches."""
    draw = random.Random(9)
    prompts = [tuple(draw.randrange(VOCAB_SIZE - 3) for _ in range(draw.randint(3, 30))) for _ in range(6)]
    return [
        (prompt, SamplingParams(20, seed=i, n=1 + i % 3, temperature=float(i % 2))) for i, prompt in enumerate(prompts)
    ]


def assert_equal(got: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert [one[:2] for one in mine] == [one[:2] for one in theirs]
        np.testing.assert_allclose([one.score for one in mine], [one.score for one in theirs], rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize(
    ("end", "limits"),
    [
        pytest.param("one", {}, id="one end token, roomy", marks=pytest.mark.slow),
        pytest.param(
            "some", {"block_size": 16, "num_blocks": 30}, id="some end tokens, large blocks", marks=pytest.mark.slow
        ),
        pytest.param("some", {"num_blocks": 36, "num_host_blocks": 200, "preemption": "swap"}, id="forced swap"),
        pytest.param(
            "many", {"num_blocks": 36, "preemption": "recompute"}, id="forced recomputation", marks=pytest.mark.slow
        ),
        pytest.param(
            "many",
            {"num_blocks": 36, "num_host_blocks": 20, "prefix_caching": False},
            id="little host memory, no caching",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_beam_search_equals_that_of_hugging_face(
    model: Decoder, hugging_face: Any, end: str, limits: dict[str, Any]
) -> None:
    shift = list(END_TOKENS).index(end)
    asked = searches(shift)
    expected = [hugging_face(prompt, params, END_TOKENS[end]) for prompt, params in asked]
    reasons = {one.finish_reason for choices in expected for one in choices}
    assert reasons == {"stop", "length"}
    beside = others()
    mixed = [*asked, *beside]
    random.Random(3).shuffle(mixed)
    engine = make_engine(model, END_TOKENS[end], **limits)
    got = dict(zip(map(repr, mixed), complete(engine, [p for p, _ in mixed], [s for _, s in mixed]), strict=True))
    assert_equal([got[repr(one)] for one in asked], expected)
    counters = engine.groups.counters
    assert counters.swapped > 0 or limits.get("preemption") != "swap"
    assert counters.recomputed > 0 or limits.get("preemption") != "recompute"
    roomy = make_engine(model, END_TOKENS[end])
    assert [got[repr(one)] for one in beside] == complete(roomy, [p for p, _ in beside], [s for _, s in beside])


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.3}, {"repetition_penalty": 0.8}, {"min_tokens": 5}])
def test_penalties_and_bans_change_beams_as_they_do_in_hugging_face(
    model: Decoder, hugging_face: Any, changes: dict[str, Any]
) -> None:
    asked = [(prompt, replace(params, **changes)) for prompt, params in searches(3)[::3]]
    expected = [hugging_face(prompt, params, END_TOKENS["many"]) for prompt, params in asked]
    engine = make_engine(model, END_TOKENS["many"], num_blocks=60)
    assert_equal(complete(engine, [p for p, _ in asked], [s for _, s in asked]), expected)

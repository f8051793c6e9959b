"""A replay finds the tokens of a logged output again, whatever chose them, and the place of a changed token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from quire import kernels
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.shared.text.grammar import write
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.features import replay as replays
from quire.worker.engine.features.grammars import Grammars
from quire.worker.engine.features.replay import Replay, divergences
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.offline import Completion, complete
from quire.worker.engine.runner import Runner
from quire.worker.models.native.decoder import Decoder
from tests.support import mock_model
from tests.support.adapters import write_adapter

DEMO = PROJECT_ROOT / DEFAULT_MODEL
PROMPT = tuple(range(40, 90))
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}}, "required": ["name"]}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 11, "ignore_eos": True, "max_tokens": 40}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine of the demo model in float32, whose kernels give equal bits in chunks, with the adapter `a`."""
    try:
        ops = kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    model = Decoder.load(DEMO, ops, torch.float32, "cpu")
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    eos = model.config.eos_token_ids
    limits = EngineLimits(num_blocks=200, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=600)
    engine = Engine(model, limits, eos, tokenizer, grammars=Grammars(tokenizer, model.vocab_size, eos))
    engine.adapters.limit = 1
    folder = tmp_path_factory.mktemp("lora") / "a"
    write_adapter(folder, DEMO, seed=1, size=1.0)
    engine.adapters.add(model.load_adapter("a", folder, 64))
    return engine


def answer(engine: Engine, **params: Any) -> tuple[GenerationRequest, list[Completion]]:
    """Return a request of PROMPT and its choices."""
    sampling = SamplingParams(**params)
    ((*choices,),) = complete(engine, [PROMPT], sampling)
    return GenerationRequest("r", "m", PROMPT, sampling), choices


def replay(engine: Engine, request: GenerationRequest, choice: int, logged: Completion) -> Replay:
    found = Replay(engine, request, choice, logged.token_ids, logged.logprobs)
    found.run()
    assert not engine.has_work
    return found


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True},
        DRAWN,
        DRAWN | {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
        DRAWN | {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        DRAWN | {"logit_bias": ((70, 6.0), (71, -100.0)), "n": 3},
        DRAWN | {"allowed_token_ids": tuple(range(60, 400))},
        DRAWN | {"bad_words": ("the", "and", "was a")},
        {"temperature": 1.0, "seed": 3, "max_tokens": 60, "min_tokens": 30},
        {"temperature": 1.0, "seed": 3, "max_tokens": 60, "grammar": write("json_schema", SCHEMA)},
        DRAWN | {"logprobs": True, "top_logprobs": 3},
        DRAWN | {"logprobs": True, "frequency_penalty": 1.0},
    ],
    ids=lambda params: "-".join(name for name in params if name not in DRAWN) or "drawn",
)
def test_every_token_is_chosen_again(engine: Engine, params: dict[str, Any]) -> None:
    request, choices = answer(engine, **params)
    for index, logged in enumerate(choices):
        found = replay(engine, request, index, logged)
        assert (found.difference, found.num_equal) == (None, len(logged.token_ids))
        assert found.num_compared == len(logged.token_ids)
        assert found.logprob_error == (0.0 if params.get("logprobs") else None)


@pytest.mark.parametrize("params", [DRAWN, DRAWN | {"frequency_penalty": 0.5}], ids=["plain", "with-history"])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_a_changed_token_is_found_at_its_place(engine: Engine, place: int, params: dict[str, Any]) -> None:
    request, [logged] = answer(engine, **params, logprobs=True)
    tokens = list(logged.token_ids)
    tokens[place] += 1
    found = Replay(engine, request, 0, tokens)
    found.run()
    assert found.difference is not None
    assert (found.difference.position, found.difference.logged) == (place, tokens[place])
    assert found.difference.chosen == logged.token_ids[place]
    assert found.difference.chosen_logprob == pytest.approx(logged.logprobs[place].logprob)
    assert found.difference.logged_logprob < 0


@pytest.mark.parametrize("most", [0, 100, 500])
def test_positions_are_sampled_in_parts_if_penalties_apply_to_many_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    request, [logged] = answer(engine, **DRAWN, frequency_penalty=0.5, repetition_penalty=1.3, bad_words=("the and",))
    monkeypatch.setattr(replays, "MAX_SEEN", most)
    found = replay(engine, request, 0, logged)
    assert (found.difference, found.num_equal) == (None, 40)


def test_each_token_that_differs_has_a_margin(engine: Engine) -> None:
    request, [logged] = answer(engine, **DRAWN, logprobs=True, top_logprobs=20)
    tokens = list(logged.token_ids)
    for place in (3, 39):
        tokens[place] = next(token for token, _ in logged.logprobs[place].top if token != tokens[place])
    found = Replay(engine, request, 0, tokens)
    found.run()
    # The change at 3 changes what the model expects later, so only the first margin is known from the log.
    chosen = logged.logprobs[3]
    assert found.margins[0] == pytest.approx(abs(chosen.logprob - dict(chosen.top)[tokens[3]]), abs=1e-5)
    assert len(found.margins) == 40 - found.num_equal >= 2


def test_without_log_probabilities_in_the_log_nothing_is_known_of_the_distribution(engine: Engine) -> None:
    request, [logged] = answer(engine, **DRAWN)
    found = replay(engine, request, 0, logged)
    assert (found.logprob_error, found.divergences) == (None, [])


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_the_divergence_of_equal_weights_is_0(engine: Engine, top: int) -> None:
    request, [logged] = answer(engine, **DRAWN, logprobs=True, top_logprobs=top)
    assert replay(engine, request, 0, logged).divergences == pytest.approx([0] * 40, abs=1e-6)


def test_divergences_are_the_largest_lower_bounds_that_the_log_allows() -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 2, (2, 50, 30))
    logged, found = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    exact = (np.exp(logged) * (logged - found)).sum(axis=1)
    before = np.zeros(50)
    for count in (1, 2, 8, 29, 30):
        at = np.argsort(-logged, axis=1)[:, :count]
        bounds = divergences(*(np.take_along_axis(one, at, axis=1) for one in (logged, found)), np.ones_like(at) > 0)
        assert (bounds >= before - 1e-6).all()
        assert (bounds <= exact + 1e-6).all()
        before = bounds
    assert before == pytest.approx(exact, abs=1e-5)
    # Two outcomes, by hand; a token that is listed twice counts once.
    one, other = np.log([[0.75, 0.75]]), np.log([[0.5, 0.5]])
    by_hand = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    assert divergences(one, other, np.array([[True, False]])) == pytest.approx(by_hand)
    # What another model never chooses is bounded, too.
    assert np.isfinite(divergences(np.log([[0.75]]), np.array([[-np.inf]]), np.array([[True]]))).all()


def test_a_token_outside_of_the_vocabulary_is_refused(engine: Engine) -> None:
    request, [logged] = answer(engine, **DRAWN, logprobs=True, top_logprobs=1)
    tokens = (*logged.token_ids[:-1], engine.vocab_size)
    with pytest.raises(RequestRefused, match="vocabulary"):
        Replay(engine, request, 0, tokens)
    other = logged.logprobs[-1]._replace(top=((engine.vocab_size, -0.5),))
    with pytest.raises(RequestRefused, match="vocabulary"):
        Replay(engine, request, 0, logged.token_ids, (*logged.logprobs[:-1], other))


def test_a_token_that_the_grammar_does_not_allow_ends_the_comparison(engine: Engine) -> None:
    request, [logged] = answer(engine, temperature=1.0, seed=3, max_tokens=60, grammar=write("json_schema", SCHEMA))
    allowed = logged.token_ids[0]
    found = Replay(engine, request, 0, (allowed + 1, *logged.token_ids[1:]))
    found.run()
    assert found.difference is not None
    assert (found.difference.position, found.difference.chosen, found.num_compared) == (0, allowed, 1)


def test_an_answer_of_an_adapter_needs_the_same_adapter(engine: Engine) -> None:
    [held] = [digest for name, digest in engine.adapters.held if name == "a"]
    request = GenerationRequest("r", "m", PROMPT, SamplingParams(**DRAWN), adapter="a", adapter_digest=held)
    tokens: list[int] = []
    engine.add(request)
    while engine.has_work:
        tokens += [token for item in engine.step() for delta in item.deltas for token in delta.token_ids]
    found = Replay(engine, request, 0, tokens)
    found.run()
    assert (found.difference, found.num_equal) == (None, 40)
    without = Replay(engine, replace(request, adapter="", adapter_digest=""), 0, tokens)
    without.run()
    assert without.difference is not None
    with pytest.raises(RequestRefused, match="digest"):
        Replay(engine, replace(request, adapter_digest="0" * 64), 0, tokens)


@pytest.mark.parametrize("params", [{"best_of": 3}, {"beam_width": 2, "temperature": 0.0}])
def test_ranked_choices_are_not_replayed(engine: Engine, params: dict[str, Any]) -> None:
    request, [logged] = answer(engine, max_tokens=4, **params)
    with pytest.raises(RequestRefused, match="best results"):
        Replay(engine, request, 0, logged.token_ids)


@pytest.mark.parametrize("runner", [Runner, DeviceRunner, mock_model.graphed])
@pytest.mark.parametrize("params", [{}, {"n": 2}, {"frequency_penalty": 0.5}])
def test_replays_run_on_every_runner_beside_other_requests(runner: Any, params: dict[str, Any]) -> None:
    make: Callable[..., Engine] = partial(mock_model.make_engine, branches=True, runner=runner)
    engine, prompt = make(), tuple(range(3, 40))
    request = mock_model.request("r", prompt, temperature=1.0, seed=5, max_tokens=30, ignore_eos=True, **params)
    engine.add(request)
    choices = mock_model.final(mock_model.run(engine), "r")
    # Few blocks, so that the replay is preempted and resumed.
    engine = make(prefix_caching=True, num_blocks=24)
    for delta in choices:
        found = Replay(engine, request, delta.choice, delta.token_ids)
        found.start()
        for name in "abc":
            engine.add(mock_model.request(name, prompt[:9], max_tokens=20, ignore_eos=True), priority=0)
        mock_model.run(engine)
        assert (found.difference, found.num_equal) == (None, 30)

"""Canaries: real ones score the answers of a real worker, are killed, and change nothing."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.ops.local.ports import free_port
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from quire.shared.protocol.logprobs import TokenLogprobs, read_records
from quire.shared.protocol.messages import GenerationRequest, decode_items
from quire.worker.build import build_engine
from quire.worker.engine.engine import Engine
from quire.worker.engine.offline import complete
from quire.worker.replay.ended_requests import is_sampled
from quire.worker.settings import WorkerSettings
from tests.conftest import QuireProcess, clean_environ
from tests.faults.test_speculation import PLACE
from tests.support.faults.stack import KEYS, MODEL, FaultStack, Stream, said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

DEMO = PROJECT_ROOT / DEFAULT_MODEL
# A Redis user with these rights is enough for a canary.
RIGHTS = ("resetkeys", "~quire:*", "resetchannels", "&quire:*", "+@read", "+subscribe", "+ping", "+info", "+hello")
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "frequency_penalty": 0.5},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {"40": 2}, "min_tokens": 20},
    {"temperature": 1, "n": 2, "logprobs": 2},
    {"temperature": 0.7, "bad_words": ["the", "was a"], "stop": [".", "never said by anyone"]},
    {"temperature": 1, "structured_outputs": {"json": PLACE}},
)
QUANTISED = {"quantization": "int8", "dtype": "float32", "threads": 1}


def call(number: int, **params: Any) -> dict[str, Any]:
    prompt = f"{number}. A story about a boat in the harbour:"
    return {"model": MODEL, "prompt": prompt, "max_tokens": 40, "seed": number} | (params or KINDS[number % len(KINDS)])


class Canary:
    """A canary of the demo model, as a Redis user that may only read, with a port for its metrics."""

    def __init__(self, stack: FaultStack, *flags: str) -> None:
        stack.redis.acl_setuser("canary", enabled=True, passwords=["+secret"], reset=False)
        stack.redis.execute_command("ACL", "SETUSER", "canary", "resetpass", ">secret", "-@all", *RIGHTS)
        port = free_port()
        arguments = ("worker", str(DEMO), "--canary", "1", "--dtype", "float32", "--threads", "1")
        arguments += ("--internal-port", str(port), "--served-model-name", MODEL, *flags)
        self.process = QuireProcess((*arguments, "--redis-url", as_user(stack.redis_server.url)), clean_environ(), None)
        stack.processes.append(self.process)
        self.url = f"http://127.0.0.1:{port}"
        self.process.wait_for("ready: a canary", 100)
        stack.wait(lambda: self.get("/health").startswith('{"status":"ok"'))

    def get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return response.read().decode()  # type: ignore[no-any-return]
        except OSError as error:
            return str(error)

    def figures(self) -> dict[str, float]:
        """Return the metrics; `name/value` with the value of a label."""
        families = text_string_to_metric_families(self.get("/metrics"))
        samples = [sample for family in families for sample in family.samples if "canary_" in sample.name]
        return {"/".join([one.name.removeprefix("quire_canary_"), *one.labels.values()]): one.value for one in samples}

    def wait_scored(self, stack: FaultStack, count: int) -> dict[str, float]:
        """Wait until so many requests are scored or skipped, and return the metrics."""

        def is_done() -> bool:
            seen = self.figures()
            names = [name for name in seen if name.startswith(("requests_total/", "skipped_total/"))]
            return sum(seen[name] for name in names) >= count

        stack.wait(is_done, 120)
        return self.figures()


def as_user(url: str) -> str:
    """Return a URL of Redis for the user of canaries."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"canary:secret@{parts.netloc.rpartition('@')[2]}"))


@pytest.fixture
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FaultStack, str]]:
    """A gateway, and a worker of the demo model."""
    stack = FaultStack(tmp_path_factory.mktemp("canary"), DEMO)
    try:
        _, url = stack.gateway()
        stack.worker("a", TEST_STEP_S="0").wait_for("ready: worker", 100)
        yield stack, url
    finally:
        stack.close()


def ask(url: str, numbers: range, **params: Any) -> list[Stream]:
    return [stream.wait_end(100) for stream in [Stream(url, call(number, **params)) for number in numbers]]


def choices(streams: list[Stream]) -> list[str]:
    assert all(stream.status == 200 for stream in streams), [stream.text_body for stream in streams]
    return [said([choice]) for stream in streams for choice in stream.answer["choices"]]


def test_a_canary_of_the_same_weights_chooses_every_token_again(demo: tuple[FaultStack, str]) -> None:
    stack, url = demo
    canary = Canary(stack)
    streams = ask(url, range(40))
    assert ask(url, range(1), best_of=2, n=1)[0].status == 200
    seen = canary.wait_scored(stack, 41)
    assert (seen["requests_total/exact"], seen["requests_total/different"]) == (40, 0)
    assert seen["skipped_total/ranked"] == 1
    written = sum(stream.answer["usage"]["completion_tokens"] for stream in streams)
    assert (seen["tokens_total/equal"], seen["tokens_total/different"]) == (written, 0)
    scored = sum(one.answer["usage"]["completion_tokens"] for one in streams if "logprobs" in one.body)
    assert seen["divergence_nats_count"] == scored > 0
    assert 0 <= seen["divergence_nats_sum"] < 1e-6 * scored
    assert seen["margin_nats_count"] == 0
    # It is no worker, holds nothing, and wrote nothing: its user cannot write.
    assert stack.redis.zrange(KEYS.workers, 0, -1) == [b"a"]
    assert not any(b"canary" in key for key in stack.redis.scan_iter("*"))
    prompt = call(0)["prompt"]
    assert prompt not in canary.process.stdout + canary.process.stderr
    stack.assert_invariants()


def logged(stack: FaultStack) -> list[tuple[GenerationRequest, list[int], list[TokenLogprobs]]]:
    """Return each choice of each ended request: the request, the tokens, and their log-probabilities."""
    found = []
    for key in stack.redis.scan_iter(f"{KEYS.prefix}req:*"):
        request = GenerationRequest.decode(stack.redis.hget(key, "body"))
        entries = stack.redis.xrange(KEYS.output(request.id))
        deltas = [one for _, fields in entries for item in decode_items(fields[b"item"]) for one in item.deltas]
        tokens = [token for one in deltas for token in one.token_ids]
        scores = [score for one in deltas for score in read_records(one.logprobs or b"", len(one.token_ids))]
        found.append((request, tokens, scores))
    return found


def chosen_after(engine: Engine, request: GenerationRequest, tokens: list[int]) -> tuple[int, dict[int, float]]:
    """Return what an engine generates after a prompt and tokens of its answer, and the most probable tokens there."""
    sampling = replace(request.sampling, max_tokens=1, logprobs=True, top_logprobs=20)
    ((one,),) = complete(engine, [(*request.prompt, *tokens)], sampling)
    return one.token_ids[0], {one.token_ids[0]: one.logprobs[0].logprob} | dict(one.logprobs[0].top)


def test_the_figures_of_a_quantised_canary_are_those_of_the_engine(demo: tuple[FaultStack, str]) -> None:
    stack, url = demo
    canary = Canary(stack, "--quantization", "int8")
    choices(ask(url, range(0, 24, 8), temperature=0, logprobs=3) + ask(url, range(1, 24, 8), temperature=0.9, top_k=8))
    seen = canary.wait_scored(stack, 6)
    # Independently: the engine generates each token anew, after the prompt and the logged tokens before it.
    engine = build_engine(WorkerSettings(model=str(DEMO), device="cpu", num_blocks=64, **QUANTISED), "test")  # type: ignore[arg-type]
    equal, exact, margins, divergence = 0, 0, list[float](), 0.0
    found = logged(stack)
    assert len(found) == 6
    for request, tokens, scores in found:
        same = []
        for place, token in enumerate(tokens):
            chosen, probable = chosen_after(engine, request, tokens[:place])
            same.append(chosen == token)
            if not same[-1]:
                margins.append(abs(probable[chosen] - probable[token]))
            if scores:
                outcomes = {token: scores[place].logprob} | dict(scores[place].top)
                here = np.exp([*outcomes.values()])
                there = np.exp([probable[one] for one in outcomes])
                here, there = (np.append(part, max(1e-7, 1 - part.sum())) for part in (here, there))
                divergence += float((here * np.log(here / there)).sum())
        equal += sum(same)
        exact += all(same)
    total = sum(len(tokens) for _, tokens, _ in found)
    assert 0.5 * total < equal < total
    assert (seen["tokens_total/equal"], seen["tokens_total/different"]) == (equal, total - equal)
    assert (seen["requests_total/exact"], seen["requests_total/different"]) == (exact, 6 - exact)
    assert seen["divergence_nats_count"] == sum(len(tokens) for _, tokens, scores in found if scores)
    assert divergence > 1e-3
    assert seen["divergence_nats_sum"] == pytest.approx(divergence, rel=1e-3)
    assert seen["margin_nats_count"] == len(margins)
    assert seen["margin_nats_sum"] == pytest.approx(sum(margins), rel=1e-3)


@pytest.mark.faults
def test_killed_canaries_change_no_text_and_leave_nothing(demo: tuple[FaultStack, str]) -> None:
    stack, url = demo
    expected = choices(ask(url, range(24)))
    for _ in range(3):
        canary = Canary(stack, "--quantization", "int8")
        streams = [Stream(url, call(number)) for number in range(24)]
        stack.wait(lambda canary=canary: sum(canary.figures().values()) > 2)  # type: ignore[misc]
        canary.process.kill()
        assert choices([stream.wait_end(100) for stream in streams]) == expected
    stack.wait(lambda: stack.redis.pubsub_numsub(KEYS.endings) == [(KEYS.endings.encode(), 0)])
    assert stack.redis.zrange(KEYS.workers, 0, -1) == [b"a"]
    stack.assert_invariants()


def test_canaries_of_a_share_score_the_same_requests(demo: tuple[FaultStack, str]) -> None:
    stack, url = demo
    one, other = (Canary(stack, "--canary", "0.4", "--log-level", "debug") for _ in range(2))
    ask(url, range(20), temperature=0)
    ids = [request.id for request, _, _ in logged(stack)]
    sampled = {request_id for request_id in ids if is_sampled(request_id, 0.4)}
    assert 0 < len(sampled) < 20
    for canary in (one, other):
        canary.wait_scored(stack, len(sampled))
        text = canary.process.stdout + canary.process.stderr
        assert {request_id for request_id in ids if request_id in text} == sampled

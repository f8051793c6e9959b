"""Records the tour of the engine page: `python -m quire.ops.tools.record_tour`.

An engine of the demo model runs the requests of each chapter, and tells its steps as a worker does. Writes
gateway/features/pages/static/tour.json; the same engine writes the same file again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer

from quire.gateway.features.pages.engine_viewer import view_object
from quire.kernels import CpuOps
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from quire.shared.protocol.messages import GenerationRequest, SamplingParams, StepItem
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.drafts.drafts import Drafts
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.step import Step
from quire.worker.inspect.engine_view import make_view
from quire.worker.inspect.snapshot import take_snapshot
from quire.worker.inspect.step_log import StepLog
from quire.worker.models.native.decoder import Decoder

FILE = PROJECT_ROOT / "gateway" / "features" / "pages" / "static" / "tour.json"
DEMO = PROJECT_ROOT / DEFAULT_MODEL
BLOCK_SIZE = 8
MAX_MODEL_LEN = 256
# Steps of one view. The page knows the cached blocks as of each view.
STEPS_PER_VIEW = 4
# Fields of a view that the player reads.
FIELDS = ("worker", "limits", "cells", "sequences", "members", "steps")
FOX = "Tell me a story about a fox."
LIGHTHOUSE = "Tell me a story about a lighthouse."
REQUESTS = {
    "hello": "Hello!",
    "fox": FOX,
    "you": "Who are you?",
    "light": LIGHTHOUSE,
    "poem": "Write a poem about the sea.",
    "france": "What is the capital of France?",
}


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@cache
def _model() -> Decoder:
    # float32: its kernels give equal bits in chunks and in single tokens, so a resumed answer is the same answer.
    return Decoder.load(DEMO, CpuOps(torch.float32), torch.float32, "cpu")


def _prompt(text: str) -> tuple[int, ...]:
    return tuple(_tokenizer().encode(f"<|begin|><|user|>{text}<|end|><|assistant|>", add_special_tokens=False).ids)


def _texts(token_ids: list[int]) -> list[str]:
    """Return the text of each token; of the special ones only the beginning of an answer has one."""
    names = [_tokenizer().id_to_token(token) or "" for token in token_ids]
    special = {"<|assistant|>": " » "}
    return [
        special.get(name, "") if name.startswith("<|") else name.replace("Ġ", " ").replace("Ċ", "\n") for name in names
    ]


@dataclass
class RecordedWorker:
    """Runs an engine as the worker `worker`, and keeps its views and the tokens of its sequences."""

    worker: str
    limits: EngineLimits
    texts: dict[str, list[str]]
    # Drafted tokens by sequence, and by the number of tokens before them.
    drafts: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    items: dict[str, list[StepItem]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = _model()
        self.engine = Engine(model, self.limits, model.config.eos_token_ids, _tokenizer())
        self.engine.checks_itself = True
        self._log = StepLog(self.engine.groups)
        self.engine.observer = self._observe
        self._tokens: dict[str, list[int]] = {}

    def _observe(self, step: Step) -> None:
        self._log(step)
        for one in step.verifications:
            name = f"{one.sequence.group.request_id}/{one.sequence.choice}"
            self.drafts.setdefault(name, {})[len(one.sequence.token_ids)] = _texts(list(one.draft))

    def add(self, name: str, text: str, earlier: tuple[StepItem, ...] = (), **params: Any) -> None:
        """Add a request. `earlier`: what another worker wrote of its answer."""
        prediction = params.pop("prediction", ())
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params})
        request = GenerationRequest(name, "demo", _prompt(text), sampling, prediction=prediction)
        self.engine.add(request, earlier)
        for choice in range(sampling.num_sequences):
            self._tokens[f"{name}/{choice}"] = list(request.prompt)
            self.texts[f"{name}/{choice}"] = _texts(list(request.prompt))
        self._keep(earlier)

    def step(self) -> None:
        items = self.engine.step()
        for item in items:
            self.items.setdefault(item.request_id, []).append(item)
        self._keep(items)

    def _keep(self, items: Any) -> None:
        for item in items:
            for delta in item.deltas:
                name = f"{item.request_id}/{delta.choice}"
                self._tokens[name] += delta.token_ids
                self.texts[name] = _texts(self._tokens[name])

    def output(self, name: str) -> list[int]:
        return [token for item in self.items[name] for delta in item.deltas for token in delta.token_ids]

    def view(self) -> dict[str, Any]:
        """Return the view with the steps since the last call."""
        view = view_object(make_view(take_snapshot(self.engine), self._log.take(), self.worker, 0), {})
        return {name: view[name] for name in FIELDS}


def limits(num_blocks: int, **more: Any) -> EngineLimits:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": MAX_MODEL_LEN}
    return EngineLimits(num_blocks=num_blocks, block_size=BLOCK_SIZE, **{**sizes, **more})


def _run(recorder: RecordedWorker, num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield the views of the next steps, at most until the engine has no work."""
    while num_steps > 0 and recorder.engine.has_work:
        for _ in range(min(num_steps, STEPS_PER_VIEW)):
            if recorder.engine.has_work:
                recorder.step()
        num_steps -= STEPS_PER_VIEW
        yield recorder.view()


def _pages(chapters: list[dict[str, Any]]) -> None:
    """Chapters 1 and 2: six requests arrive, one every other step; they are the same in both chapters."""
    texts: dict[str, list[str]] = {}
    recorder = RecordedWorker("worker-1", limits(96), texts)
    views = [recorder.view()]
    for name, text in REQUESTS.items():
        recorder.add(name, text)
        views += _run(recorder, 2)
    chapters.append({"id": "reserve", "texts": texts, "events": views})
    chapters.append({"id": "pages", "texts": texts, "events": [recorder.view(), *_run(recorder, 40)]})


def _share(chapters: list[dict[str, Any]]) -> None:
    """Chapter 3: four answers to one prompt."""
    texts: dict[str, list[str]] = {}
    recorder = RecordedWorker("worker-1", limits(48), texts)
    recorder.add(
        "fox", "Tell me a story about a fox who finds an old library in the woods.", n=4, temperature=1.0, seed=7
    )
    events = [recorder.view(), *_run(recorder, 60)]
    chapters.append({"id": "share", "texts": texts, "events": events})


def _full(chapters: list[dict[str, Any]]) -> None:
    """Chapter 4: memory runs out; a request is swapped out to host memory, and returns."""
    texts: dict[str, list[str]] = {}
    recorder = RecordedWorker("worker-1", limits(24, num_host_blocks=12, preemption="swap"), texts)
    recorder.add("fox", FOX, max_tokens=44)
    recorder.add("light", LIGHTHOUSE, max_tokens=52)
    recorder.add("poem", REQUESTS["poem"], max_tokens=46)
    recorder.add("bear", "Tell me a story about a bear.", max_tokens=48)
    for _ in range(24):
        recorder.step()
    events = [recorder.view()]
    events[0]["steps"] = events[0]["steps"][-1:]
    events += _run(recorder, 80)
    usage = take_snapshot(recorder.engine).usage()
    if not usage.preemptions_swap or not usage.swapped_in_blocks:
        raise RuntimeError("chapter 4 must swap a request out and in")
    chapters.append({"id": "full", "texts": texts, "events": events})


def _kill(chapters: list[dict[str, Any]]) -> None:
    """Chapter 5: a worker dies, and the other one continues its requests at the next token."""
    texts: dict[str, list[str]] = {}
    first, second = (RecordedWorker(f"worker-{number}", limits(40), texts) for number in (1, 2))
    asked = {"fox": FOX, "poem": REQUESTS["poem"]}
    events = [first.view(), second.view()]
    for name, text in asked.items():
        first.add(name, text, max_tokens=36)
    second.add("light", LIGHTHOUSE, max_tokens=40)
    for left, right in zip(_run(first, 16), _run(second, 16), strict=True):
        events += [left, right]
    events.append({"worker": first.worker, "gone": True})
    events += _run(second, 4)
    for name, text in asked.items():
        second.add(name, text, tuple(first.items[name]), max_tokens=36)
    events += _run(second, 60)
    whole = RecordedWorker("worker-3", limits(40), {})
    for name, text in asked.items():
        whole.add(name, text, max_tokens=36)
    for _ in _run(whole, 100):
        pass
    for name in asked:
        if first.output(name) + second.output(name) != whole.output(name):
            raise RuntimeError(f"the resumed answer {name} differs from the one without a death")
    chapters.append({"id": "kill", "texts": texts, "events": events})


def _drafts(chapters: list[dict[str, Any]]) -> None:
    """Chapter 6: the client sends a prediction that is right but for some words; a draft comes from it."""
    plain = RecordedWorker("worker-1", limits(24), {})
    plain.add("poem", REQUESTS["poem"], max_tokens=56)
    for _ in _run(plain, 100):
        pass
    prediction = plain.output("poem")
    for position, word in (
        (4, " night"),
        (9, " doors"),
        (15, " moon"),
        (22, " sing"),
        (28, " birds"),
        (36, " river"),
        (44, " time"),
    ):
        prediction[position] = _tokenizer().encode(word, add_special_tokens=False).ids[0]
    texts: dict[str, list[str]] = {}
    recorder = RecordedWorker("worker-1", limits(24), texts)
    recorder.engine.drafts = Drafts(recorder.engine.groups, None)
    recorder.add("poem", REQUESTS["poem"], max_tokens=56, prediction=tuple(prediction))
    events = [recorder.view(), *_run(recorder, 100)]
    if recorder.output("poem") != plain.output("poem"):
        raise RuntimeError("drafts must not change an answer")
    chapters.append({"id": "draft", "texts": texts, "drafts": recorder.drafts, "events": events})


def record() -> str:
    """Return the recording as JSON."""
    chapters: list[dict[str, Any]] = []
    for chapter in (_pages, _share, _full, _kill, _drafts):
        chapter(chapters)
    return json.dumps({"chapters": chapters}, separators=(",", ":"), ensure_ascii=False) + "\n"


def main() -> int:
    FILE.write_text(record())
    print(f"{FILE.relative_to(PROJECT_ROOT)}: {FILE.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A folder of models for the fault tests of model hosts: its answers without faults, and clients that never give up."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import threading
import time
import urllib.parse
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.ops.paths import PROJECT_ROOT
from quire.shared.protocol.messages import SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.offline import generate
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint

# Settings of the arithmetic, in the test's process and in the workers.
ARITHMETIC = {"device": "cpu", "dtype": "float32", "threads": 1, "num_blocks": 256, "speculation": "off"}
# Families besides the copies of the demo model.
FAMILIES = ("llama", "qwen2", "qwen3", "mistral-full", "gemma3", "llama-bias", "seed-oss")
PROMPT = tuple(range(20, 60))


def fill(folder: Path, copies: int, families: Sequence[str] = FAMILIES) -> list[str]:
    """Fill a folder with copies of the demo model and tiny checkpoints of other families. Return the names."""
    for number in range(copies):
        shutil.copytree(PROJECT_ROOT / "models" / "demo", folder / f"demo-{number}")
    for seed, family in enumerate(families):
        make_checkpoint(folder / family, family, seed=seed, max_position_embeddings=1024)
    return sorted(path.name for path in folder.iterdir())


def call(model: str, seed: int, tokens: int) -> dict[str, Any]:
    """A greedy call for an even seed, a drawn one for an odd seed."""
    sampling = {"temperature": 0} if seed % 2 == 0 else {"temperature": 1, "seed": seed}
    prompt = [*PROMPT, seed + 1]
    # Not the defaults of a model's generation_config.json.
    own = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": prompt, "max_tokens": tokens, **sampling, **own}


def answers(folder: Path, calls: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of each call, by an engine that has one model and no faults."""
    found: dict[int, list[int]] = {}
    for name in sorted({body["model"] for body in calls}):
        own = [index for index, body in enumerate(calls) if body["model"] == name]
        engine = build_engine(WorkerSettings(model=str(folder / name), **ARITHMETIC), name)  # type: ignore[arg-type]
        for index in own:
            body = calls[index]
            sampling = SamplingParams(
                max_tokens=body["max_tokens"],
                temperature=float(body["temperature"]),
                seed=body.get("seed", 0),
                ignore_eos=True,
            )
            found[index] = generate(engine, [tuple(body["prompt"])], sampling)[0][0]
    return [found[index] for index in range(len(calls))]


@dataclass
class StubbornClient:
    """Sends one call with an Idempotency-Key to any gateway until it has the answer.

    urls: of gateways that are ready; the test changes the list. refusals: statuses other than 200, which no client
    should see, each with the body.
    """

    urls: list[str]
    body: dict[str, Any]
    refusals: list[tuple[int, str]] = field(default_factory=list)
    token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> list[int]:
        """Return the answer."""
        self._thread.join(timeout_s)
        self._stop.set()
        assert self.token_ids is not None, f"{self.body['model']} has no answer: {self.refusals}"
        return self.token_ids

    def _run(self) -> None:
        headers = {"Content-Type": "application/json", "Idempotency-Key": uuid.uuid4().hex}
        while self.token_ids is None and not self._stop.is_set():
            url = urllib.parse.urlsplit(self.urls[0])
            connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=120)
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("POST", "/v1/completions", json.dumps(self.body), headers)
                response = connection.getresponse()
                text = response.read().decode()
                if response.status == 200:
                    self.token_ids = json.loads(text)["choices"][0]["token_ids"]
                else:
                    self.refusals.append((response.status, text))
            connection.close()
            if self.token_ids is None:
                time.sleep(0.05)

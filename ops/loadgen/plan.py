"""The plan of a run, made from its settings. Contradicting settings are refused before any request is sent."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from quire.ops.loadgen.settings import BenchSettings
from quire.ops.loadgen.shapes import SHAPES, Lengths, WorkloadShape
from quire.shared.config.settings import SettingError

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 16
SLO_NAMES = ("ttft", "tpot", "itl", "e2e")
_LIMIT = re.compile(r"([a-z0-9]+)\s*[=:]\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s)", re.ASCII)


@dataclass(frozen=True)
class Plan:
    """The load of a run.

    Either `requests` or `duration_s` is set, and either `rate` (requests per second, open loop) or `concurrency`
    (closed loop). rounds: number of blocks per server. slo: limits in seconds by name.
    """

    shape: WorkloadShape
    requests: int | None
    duration_s: float | None
    rate: float | None
    concurrency: int | None
    burstiness: float
    rounds: int
    slo: dict[str, float]
    seed: int

    @property
    def load(self) -> str:
        """The arrival of requests, in words."""
        if self.concurrency is not None:
            return f"closed loop, {self.concurrency} at once"
        if self.rate == math.inf:
            return "all at once"
        kind = "Poisson" if self.burstiness == 1 else f"gamma with burstiness {self.burstiness:g}"
        return f"{self.rate:g} requests/s, {kind}"

    def block_requests(self, block: int) -> int | None:
        """Return the number of requests of a block; None for a closed loop with a duration."""
        if self.requests is not None:
            return self.requests * (block + 1) // self.rounds - self.requests * block // self.rounds
        if self.rate is not None and self.block_s is not None:
            return max(1, round(self.rate * self.block_s))
        return None

    @property
    def block_s(self) -> float | None:
        """For how long a block sends requests; None for a run by number."""
        return None if self.duration_s is None else self.duration_s / self.rounds


def make_plan(settings: BenchSettings) -> Plan:
    """Make the plan of a run. Raise SettingError, which names the setting, its value and the remedy."""
    rate = _rate(settings.rate)
    if rate is not None and settings.concurrency is not None:
        raise SettingError(
            f"--rate and --concurrency are both given ({settings.rate} and {settings.concurrency}); give --rate for an "
            "open loop or --concurrency for a closed one"
        )
    if settings.requests is not None and settings.duration_s is not None:
        raise SettingError(
            f"--requests and --duration-s are both given ({settings.requests} and {settings.duration_s:g}); give one"
        )
    if settings.burstiness is not None and rate is None:
        raise SettingError(
            f"--burstiness: {settings.burstiness:g} has no meaning in a closed loop; give --rate with it"
        )
    if rate == math.inf and settings.duration_s is not None:
        raise SettingError("--rate: inf sends everything at once; give --requests with it instead of --duration-s")
    if settings.prompts == "ids" and settings.endpoint == "chat":
        raise SettingError("--prompts: ids are for completions only; give --prompts text or --endpoint completions")
    if settings.save_requests and not settings.json:
        raise SettingError("--save-requests: there is no file for them; give --json FILE")
    if settings.against_model and not settings.against:
        raise SettingError(f"--against-model: {settings.against_model!r} without another server; give --against URL")
    for name in ("json", "html"):
        path = Path(getattr(settings, name) or ".")
        if not path.parent.is_dir() or (path.is_dir() and getattr(settings, name)):
            raise SettingError(f"--{name}: {str(path)!r} cannot be written; give a file in a folder that exists")
    requests = settings.requests
    if requests is None and settings.duration_s is None:
        requests = DEFAULT_REQUESTS
    rounds = settings.rounds if settings.against else 1
    if requests is not None and requests < rounds:
        remedy = f"give --requests {rounds} or more, or --rounds {requests} or fewer"
        raise SettingError(f"--requests: {requests} are fewer than the {rounds} blocks; {remedy}")
    concurrency = settings.concurrency
    if rate is None and concurrency is None:
        concurrency = DEFAULT_CONCURRENCY
    return Plan(
        shape=_shape(settings),
        requests=requests,
        duration_s=settings.duration_s,
        rate=rate,
        concurrency=concurrency,
        burstiness=1.0 if settings.burstiness is None else settings.burstiness,
        rounds=rounds,
        slo=parse_slo(settings.slo),
        seed=settings.seed,
    )


def parse_slo(text: str) -> dict[str, float]:
    """Return the seconds by name from `ttft=500ms,tpot=50ms`. Raise SettingError."""
    limits: dict[str, float] = {}
    for part in filter(None, re.split(r"[,\s]+", text.strip())):
        match = _LIMIT.fullmatch(part.lower())
        if match is None or match[1] not in SLO_NAMES or match[1] in limits or not float(match[2]):
            raise SettingError(
                f"--slo: {part!r} in {text!r} is no limit; give {', '.join(SLO_NAMES)} once each, with a unit, such as "
                "ttft=500ms,e2e=2s"
            )
        limits[match[1]] = float(match[2]) / (1000 if match[3] == "ms" else 1)
    return limits


def _rate(text: str) -> float | None:
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0 or (math.isfinite(rate) and not 0.001 <= rate <= 1_000_000):
        raise SettingError(f"--rate: {text!r} is no rate; give requests per second from 0.001 to 1000000, or inf")
    return rate


def _shape(settings: BenchSettings) -> WorkloadShape:
    shape = SHAPES[settings.shape]
    for name, shapes in (
        ("input_tokens", ("fixed", "prefix")),
        ("output_tokens", ("fixed", "prefix")),
        ("prefix_tokens", ("prefix",)),
    ):
        if getattr(settings, name) is not None and shape.name not in shapes:
            flag, given = "--" + name.replace("_", "-"), getattr(settings, name)
            raise SettingError(
                f"{flag}: {given} does not go with the shape {shape.name}; give --shape {' or '.join(shapes)}"
            )
    if settings.input_tokens is not None:
        shape = replace(shape, prompt=Lengths(settings.input_tokens))
    if settings.output_tokens is not None:
        shape = replace(shape, answer=Lengths(settings.output_tokens))
    if settings.prefix_tokens is not None:
        shape = replace(shape, shared_prefix=settings.prefix_tokens)
    return shape

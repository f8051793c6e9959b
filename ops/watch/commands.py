"""The commands that look at what runs: their settings, what their `--help` says, and which code runs them.

This module stays light: `--help` must load neither the Redis client nor rich.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.shared.config.command_line import Command
from quire.shared.config.settings import option

FLAG_ONLY = ""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How a result is printed."""

    json: bool = option(False, variable=FLAG_ONLY, help="Print JSON.", last=True)


@dataclass(frozen=True, kw_only=True)
class OfStateFolder(Shown):
    """A `quire serve`, by its state folder."""

    state_dir: str = option(
        "", metavar="DIR", help="State folder of the `quire serve`, if it was given one.", last=True
    )


@dataclass(frozen=True, kw_only=True)
class OfRedis(OfStateFolder):
    """A Redis, by default that of a running `quire serve`."""

    redis_url: str = option(
        "",
        help="Redis of the requests; by default that of the running `quire serve`, or redis://127.0.0.1:6379/0 if none "
        "runs.",
        metavar="URL",
        secret=True,
        last=True,
    )


@dataclass(frozen=True, kw_only=True)
class StopSettings(OfStateFolder):
    """The settings of `quire stop`."""

    all: bool = option(False, variable=FLAG_ONLY, help="Stop every `quire serve` of this user.")
    now: bool = option(
        False, variable=FLAG_ONLY, help="Do not let running requests end; they continue at the next start."
    )
    timeout_s: float = option(
        120.0, minimum=0, variable=FLAG_ONLY, metavar="SECONDS", help="Time to wait for the end, for each of them."
    )


@dataclass(frozen=True, kw_only=True)
class TraceSettings(OfRedis):
    """The settings of `quire trace`."""

    id: str = option(
        "",
        positional=True,
        variable=FLAG_ONLY,
        metavar="ID",
        help="Request, as answers, logs and the header X-Quire-Request-Id name it.",
    )
    served_model_name: str = option(
        "", metavar="NAME", help="Model of the request; by default all models of the last hour are asked."
    )


@dataclass(frozen=True, kw_only=True)
class TopSettings(OfRedis):
    """The settings of `quire top`."""

    served_model_name: str = option(
        "", metavar="NAME", help="Show only this model; by default those of the last hour, eight at most."
    )
    interval_s: float = option(
        1.0, minimum=0.2, maximum=60, variable=FLAG_ONLY, metavar="SECONDS", help="Time between two looks at Redis."
    )


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(OfRedis):
    """The settings of `quire doctor`. Those of `quire serve` have the same variables."""

    model: str = option(
        "models/demo",
        metavar="MODEL",
        help="Folder of the checkpoint, or a GGUF file, whose size is compared with the memory.",
        positional=True,
    )
    host: str = option("127.0.0.1", help="Address that `quire serve` is to listen on.")
    port: int = option(8000, minimum=0, maximum=65535, help="Port that `quire serve` is to listen on.")


def _ps(settings: OfStateFolder, environ: Mapping[str, str]) -> int:
    from quire.ops.watch.servers import ps

    return ps(settings, environ)


def _stop(settings: StopSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.watch.servers import stop

    return stop(settings, environ)


def _trace(settings: TraceSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.watch.trace import trace

    return trace(settings, environ)


def _top(settings: TopSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.watch.top import top

    return top(settings, environ)


def _doctor(settings: DoctorSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.watch.doctor import doctor

    return doctor(settings, environ)


PS = Command(
    "List the running `quire serve`s of this user.",
    "Print a line for each `quire serve` of this user on this machine: its pid, its URL, whether it is ready, its "
    "models and its state folder.",
    ("{prog}", "{prog} --json"),
    OfStateFolder,
    _ps,
)
STOP = Command(
    "Stop a `quire serve`, and wait for its end.",
    "Stop the `quire serve` of a state folder as Ctrl-C does: running requests may end for --drain-s, and those that "
    "do not are kept and continue at the next start. The exit code is 1 if none runs, or if it has not ended in time.",
    ("{prog}", "{prog} --state-dir ~/quire-state", "{prog} --all --now"),
    StopSettings,
    _stop,
)
TRACE = Command(
    "Show the life of one request, and what it waited for.",
    "Print when a request was accepted, who claimed it, its first token, recoveries and its end, and what it waited "
    "for. Redis knows a request until ten minutes after its end. Prompt and answer are not shown.",
    (
        "{prog} chatcmpl-0123456789abcdef0123456789abcdef",
        "{prog} 0123456789abcdef0123456789abcdef --json",
        "{prog} 0123456789abcdef0123456789abcdef --redis-url redis://10.0.0.5:6379/0",
    ),
    TraceSettings,
    _trace,
)
TOP = Command(
    "Watch queues, workers and the slowest answers.",
    "Show queues, workers, running requests and errors of all models, and renew them every second. Keys: Tab and the "
    "arrows select; i inspects, c cancels, p parks a request; d drains a worker; q leaves. Cost for Redis: a fixed "
    "number of commands, however many requests there are. With --json it prints one look.",
    ("{prog}", "{prog} --served-model-name qwen --interval-s 5", "{prog} --json --redis-url redis://10.0.0.5:6379/0"),
    TopSettings,
    _top,
)
DOCTOR = Command(
    "Check this machine and its Redis, with a remedy for each fault.",
    "Check processor, kernels, memory, GPU, limits and ports of this machine, and version, settings and clock of "
    "Redis. It starts nothing. The exit code is 1 if a check has failed.",
    ("{prog}", "{prog} ./my-model --port 9000", "{prog} --json --redis-url redis://10.0.0.5:6379/0"),
    DoctorSettings,
    _doctor,
)

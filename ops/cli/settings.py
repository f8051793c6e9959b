"""The settings of `quire serve` and `quire chat`. The services have theirs in gateway/ and worker/."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.service_settings import CommonSettings, DeviceSettings, ListenSettings
from quire.shared.settings import option


@dataclass(frozen=True, kw_only=True)
class ServeSettings(DeviceSettings, ListenSettings, CommonSettings):
    """One machine: Redis, workers and a gateway. Other settings go to the services unchanged."""

    workers: int = option(1, minimum=1, maximum=64, metavar="N", help="Worker processes, each with the whole model.")
    redis_url: str = option(
        "",
        help="Redis that runs already (redis://, redis+sentinel://, redis+cluster:// or unix://); without this setting "
        "`quire serve` starts its own, and gateways and workers take redis://127.0.0.1:6379/0.",
        metavar="URL",
        secret=True,
    )
    max_model_len: int = option(0, minimum=0, metavar="N", help="Longest context in tokens; 0 is the model's own.")
    state_dir: str = option(
        "",
        metavar="DIR",
        help="Folder for Redis' data, logs and the lock; by default .quire in the checkout, or the user's state "
        "folder for an installed package. Each running `quire serve` needs its own.",
    )
    start_timeout_s: float = option(
        1800.0,
        minimum=1,
        metavar="SECONDS",
        help="Seconds after which a start without an answer is given up; loading can take minutes.",
    )


@dataclass(frozen=True, kw_only=True)
class DeadSettings:
    """Requests that were given up."""

    action: str = option(
        "list",
        positional=True,
        variable="QUIRE_DEAD_ACTION",
        metavar="ACTION",
        choices=("list", "show", "retry", "drop"),
        help="Action: list all dead letters, or show, retry or drop one.",
    )
    entry: str = option(
        "", variable="QUIRE_DEAD_ENTRY", metavar="ID", help="Entry to show, retry or drop, as `list` names it."
    )
    redis_url: str = option(
        "",
        help="Redis that holds the requests; by default the one of the running `quire serve`, and without one "
        "redis://127.0.0.1:6379/0.",
        metavar="URL",
        secret=True,
    )
    state_dir: str = option("", metavar="DIR", help="State folder of the running `quire serve`, if it was given one.")
    served_model_name: str = option(
        "", metavar="NAME", help="Served model whose requests are meant; by default all models."
    )
    count: int = option(
        100,
        minimum=1,
        maximum=10_000,
        variable="QUIRE_DEAD_COUNT",
        metavar="N",
        help="Largest number of entries listed.",
    )


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """A conversation in the terminal with any server that speaks the OpenAI API."""

    prompt: str = option(
        "",
        positional=True,
        variable="QUIRE_CHAT_PROMPT",
        help="Question to ask: print the answer and exit; - reads the question from standard input.",
    )
    url: str = option(
        "http://127.0.0.1:8000", variable="QUIRE_CHAT_URL", help="Base URL of the server, with or without /v1."
    )
    model: str = option(
        "", variable="QUIRE_CHAT_MODEL", metavar="NAME", help="Model to ask; by default the first one of the server."
    )
    system: str = option("", variable="QUIRE_CHAT_SYSTEM", metavar="TEXT", help="System message of the conversation.")
    temperature: float | None = option(
        None,
        minimum=0,
        maximum=2,
        variable="QUIRE_CHAT_TEMPERATURE",
        help="Sampling temperature, 0 is greedy; unset is the server's default.",
    )
    top_p: float | None = option(
        None,
        minimum=0,
        maximum=1,
        variable="QUIRE_CHAT_TOP_P",
        help="Nucleus sampling probability; unset is the server's default.",
    )
    max_tokens: int | None = option(
        None, minimum=1, variable="QUIRE_CHAT_MAX_TOKENS", metavar="N", help="Longest answer in tokens."
    )
    seed: int | None = option(
        None, minimum=0, variable="QUIRE_CHAT_SEED", help="Seed of sampling: the same seed gives the same answer."
    )
    api_key: str = option(
        "", variable="QUIRE_CHAT_API_KEY", metavar="KEY", secret=True, help="API key, sent as a bearer token if given."
    )

"""The settings of `quire serve`, `quire chat` and `quire dead`, and the list of all settings classes of Quire."""

from __future__ import annotations

from dataclasses import dataclass

from quire.gateway.admin.dead_letter_settings import DeadLetterSettings
from quire.gateway.settings import GatewaySettings
from quire.ops.loadgen.settings import BenchSettings
from quire.shared.settings import option
from quire.worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """One machine: Redis, workers and a gateway. What is not here goes to the services as it was given."""

    model: str = option(
        "models/demo",
        help="Folder of the checkpoint, or its Hugging Face name; the default is the model that comes with Quire.",
        metavar="MODEL",
        positional=True,
    )
    host: str = option("127.0.0.1", help="Address to listen on; 0.0.0.0 is every interface.")
    port: int = option(8000, minimum=0, maximum=65535, help="Port to listen on; 0 takes a free one.")
    workers: int = option(1, minimum=1, maximum=64, metavar="N", help="Worker processes, each with the whole model.")
    redis_url: str = option(
        "",
        help="A Redis that runs already (redis://, redis+sentinel://, redis+cluster:// or unix://); without it "
        "`quire serve` starts its own, and the other commands take redis://127.0.0.1:6379/0.",
        metavar="URL",
        secret=True,
    )
    device: str = option("auto", choices=("auto", "cpu", "cuda"), help="Where the model runs.")
    dtype: str = option(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="Type of weights and KV cache; auto chooses what the machine computes with best.",
    )
    served_model_name: str = option(
        "", metavar="NAME", help="Name that clients use; by default the folder's or the Hugging Face name."
    )
    max_model_len: int = option(0, minimum=0, metavar="N", help="Longest context in tokens; 0 is the model's own.")
    state_dir: str = option(
        "",
        metavar="DIR",
        help="Folder for Redis' data, logs and the lock; by default .quire beside the sources, or the user's state "
        "folder for an installed package. One per running `quire serve`.",
    )
    start_timeout_s: float = option(
        1800.0, minimum=1, metavar="SECONDS", help="Give up if nothing answers after so long; loading can take minutes."
    )
    log_level: str = option("info", choices=("debug", "info", "warning", "error"), help="What the services log.")
    log_format: str = option(
        "text", choices=("text", "json"), help="How they log: lines for people, or one JSON object per line."
    )


@dataclass(frozen=True, kw_only=True)
class DeadSettings(DeadLetterSettings):
    """The dead-letter queue of a Redis, by default that of a running `quire serve`."""

    redis_url: str = option(
        "",
        help="Redis that holds the requests; by default that of the running `quire serve`, or "
        "redis://127.0.0.1:6379/0 if none runs.",
        metavar="URL",
        secret=True,
    )
    state_dir: str = option("", metavar="DIR", help="State folder of that `quire serve`, if it was given one.")


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """A conversation in the terminal with any server that speaks the OpenAI API."""

    prompt: str = option(
        "", positional=True, variable="QUIRE_CHAT_PROMPT", help="Ask this, print the answer and leave; - reads it."
    )
    url: str = option("http://127.0.0.1:8000", variable="QUIRE_CHAT_URL", help="The server, with or without /v1.")
    model: str = option(
        "", variable="QUIRE_CHAT_MODEL", metavar="NAME", help="Model to ask; by default the first that the server has."
    )
    system: str = option("", variable="QUIRE_CHAT_SYSTEM", metavar="TEXT", help="System message of the conversation.")
    temperature: float | None = option(
        None, minimum=0, maximum=2, variable="QUIRE_CHAT_TEMPERATURE", help="0 is greedy; unset is the server's."
    )
    top_p: float | None = option(
        None, minimum=0, maximum=1, variable="QUIRE_CHAT_TOP_P", help="Nucleus sampling; unset is the server's."
    )
    max_tokens: int | None = option(
        None, minimum=1, variable="QUIRE_CHAT_MAX_TOKENS", metavar="N", help="Longest answer in tokens."
    )
    seed: int | None = option(
        None, minimum=0, variable="QUIRE_CHAT_SEED", help="The same seed draws the same answer again."
    )
    api_key: str = option(
        "", variable="QUIRE_CHAT_API_KEY", metavar="KEY", secret=True, help="Sent as a bearer token if given."
    )


# The settings of all commands: together they are what `QUIRE_*` variables may name.
ALL_SETTINGS = (ServeSettings, GatewaySettings, WorkerSettings, ChatSettings, BenchSettings, DeadSettings)

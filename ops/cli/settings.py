"""The settings of `quire serve` and of the commands around it, and the list of all settings classes of Quire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.gateway.features.admin.commands import DeadLetterSettings
from quire.gateway.features.keys.key_settings import KeyRedis
from quire.gateway.features.parking.commands import ParkingSettings
from quire.gateway.settings import GatewaySettings
from quire.ops.loadgen.settings import BenchSettings
from quire.shared.config.service_settings import CommonSettings, DeviceSettings, ListenSettings
from quire.shared.config.settings import option
from quire.shared.redis.url import DEFAULT_REDIS_URL
from quire.worker.replay.commands import ReplaySettings
from quire.worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class ServeSettings(DeviceSettings, ListenSettings, CommonSettings):
    """The settings of `quire serve`. The command passes all other settings on to gateway and workers unchanged."""

    model: str = option(
        "models/demo",
        help="Folder of the checkpoint, a GGUF file, or a Hugging Face name, with the quantisation of GGUF files after "
        "a colon; the default is the model that comes with Quire. With several models, each has workers of its own, "
        "and the gateways serve all of them.",
        metavar="MODEL",
        positional=True,
        repeatable=True,
    )
    served_model_name: str = option(
        "",
        metavar="NAME",
        help="Name that clients use; by default that of the folder, the file or Hugging Face. With several models, a "
        "name for each, separated by commas.",
    )
    workers: int = option(
        1,
        minimum=1,
        maximum=64,
        metavar="N",
        help="Number of worker processes of each model; each process loads the whole model.",
    )
    gateways: int = option(
        1,
        minimum=1,
        maximum=64,
        metavar="N",
        help="Number of gateway processes; the kernel distributes new connections among them (SO_REUSEPORT).",
    )
    redis_url: str = option(
        "",
        help="URL of a running Redis (redis://, redis+sentinel://, redis+cluster:// or unix://). If not set, "
        f"`quire serve` starts its own, and the other commands use {DEFAULT_REDIS_URL}.",
        metavar="URL",
        secret=True,
    )
    max_model_len: int = option(
        0, minimum=0, metavar="N", help="Longest context in tokens; 0 uses the model's own limit."
    )
    state_dir: str = option(
        "",
        metavar="DIR",
        help="Folder for Redis' data, logs and the lock, one per running `quire serve`. The default is .quire in a "
        "checkout, and the user's state folder for an installed package.",
    )
    start_timeout_s: float = option(
        1800.0,
        minimum=1,
        metavar="SECONDS",
        help="Give up if the server is not ready after this time; loading a model can take minutes.",
    )


@dataclass(frozen=True, kw_only=True)
class DeadSettings(DeadLetterSettings):
    """The dead-letter queue of a Redis, by default that of a running `quire serve`."""

    redis_url: str = option(
        "",
        help="Redis that holds the requests; by default that of the running `quire serve`, or "
        f"{DEFAULT_REDIS_URL} if none runs.",
        metavar="URL",
        secret=True,
    )
    state_dir: str = option("", metavar="DIR", help="State folder of that `quire serve`, if it was given one.")


@dataclass(frozen=True, kw_only=True)
class ParkedSettings(ParkingSettings):
    """The parked requests of a Redis, by default that of a running `quire serve`."""

    redis_url: str = option(
        "",
        help="Redis that holds the requests; by default that of the running `quire serve`, or "
        "redis://127.0.0.1:6379/0 if none runs.",
        metavar="URL",
        secret=True,
    )
    state_dir: str = option("", metavar="DIR", help="State folder of that `quire serve`, if it was given one.")


@dataclass(frozen=True, kw_only=True)
class ReplayedSettings(ReplaySettings):
    """A request in a Redis, by default that of a running `quire serve`."""

    redis_url: str = option(
        "",
        help="Redis that holds the request; by default that of the running `quire serve`, or "
        f"{DEFAULT_REDIS_URL} if none runs.",
        metavar="URL",
        secret=True,
    )
    state_dir: str = option("", metavar="DIR", help="State folder of that `quire serve`, if it was given one.")


@dataclass(frozen=True, kw_only=True)
class KeysOfStateFolder(KeyRedis):
    """The API keys in a Redis, by default that of a state folder of `quire serve`."""

    redis_url: str = option(
        "",
        help="Redis that holds the keys; by default that of `quire serve`, also while it does not run.",
        metavar="URL",
        secret=True,
        last=True,
    )
    state_dir: str = option(
        "", metavar="DIR", help="State folder of that `quire serve`, if it was given one.", last=True
    )


def of_state_folder(settings: type[KeyRedis]) -> type[KeyRedis]:
    """Return the settings of a command on keys, with the Redis of a state folder as the default."""
    combined = type(settings.__name__, (KeysOfStateFolder, settings), {"__doc__": settings.__doc__})
    return dataclass(frozen=True, kw_only=True)(combined)


@dataclass(frozen=True, kw_only=True)
class ModelsOfFolder:
    """A folder of models, and the Redis of the worker that serves it."""

    models_dir: str = option(
        "",
        metavar="FOLDER",
        help="Folder of models that `quire serve --models-dir` or `quire worker --models-dir` serves.",
        last=True,
    )
    redis_url: str = option(
        "",
        help=f"Redis of the worker that serves the folder; by default that of the running `quire serve`, or "
        f"{DEFAULT_REDIS_URL} if none runs.",
        metavar="URL",
        secret=True,
        last=True,
    )
    state_dir: str = option(
        "", metavar="DIR", help="State folder of that `quire serve`, if it was given one.", last=True
    )


@dataclass(frozen=True, kw_only=True)
class ListModels(ModelsOfFolder):
    """All models of a folder."""

    json: bool = option(False, variable="", help="Print JSON.")


@dataclass(frozen=True, kw_only=True)
class AddModel(ModelsOfFolder):
    """A model that is put into a folder."""

    model: str = option(
        "",
        positional=True,
        variable="",
        metavar="MODEL",
        help="Folder of the checkpoint, a GGUF file, or a Hugging Face name such as owner/name.",
    )
    name: str = option("", variable="", metavar="NAME", help="Name that clients use; by default that of the model.")
    mode: str = option(
        "auto",
        variable="",
        choices=("auto", "copy", "link"),
        help="copy: copy the files that are read. link: make a symbolic link. auto: link a model of the Hugging "
        "Face Hub to its download in the cache, and copy any other.",
    )


@dataclass(frozen=True, kw_only=True)
class RemoveModel(ModelsOfFolder):
    """A model that is removed from a folder."""

    name: str = option("", positional=True, variable="", metavar="NAME", help="Name of the model.")
    yes: bool = option(False, variable="", help="Do not ask.")


@dataclass(frozen=True, kw_only=True)
class BatchCommandSettings:
    """The settings of `quire batch`, for any server with OpenAI's files and batches."""

    action: str = option(
        "list",
        positional=True,
        variable="QUIRE_BATCH_ACTION",
        metavar="ACTION",
        choices=("list", "submit", "status", "cancel", "fetch"),
        help="List the newest batches; submit a file of calls; show, cancel or fetch a batch.",
    )
    file: str = option(
        "", variable="QUIRE_BATCH_FILE", metavar="FILE", help="JSONL file with the calls of a new batch, one a line."
    )
    endpoint: str = option(
        "",
        variable="QUIRE_BATCH_ENDPOINT",
        metavar="PATH",
        help="Endpoint of the calls, such as /v1/chat/completions; by default the `url` of the first line.",
    )
    completion_window: str = option(
        "24h",
        variable="QUIRE_BATCH_COMPLETION_WINDOW",
        metavar="TIME",
        help="Minutes, hours or days until a new batch expires: 90m, 24h, 7d.",
    )
    metadata: str = option(
        "",
        variable="QUIRE_BATCH_METADATA",
        metavar="KEY=VALUE",
        repeatable=True,
        help="Metadata of a new batch, which its answers repeat.",
    )
    id: str = option(
        "", variable="QUIRE_BATCH_ID", metavar="ID", help="Batch to show, cancel or fetch: an id that `list` prints."
    )
    wait: bool = option(
        False, variable="QUIRE_BATCH_WAIT", help="Wait for the end of the batch, with a progress bar on standard error."
    )
    output: str = option(
        "-",
        variable="QUIRE_BATCH_OUTPUT",
        metavar="FILE",
        help="File for the answers that `fetch` gets; - is standard output.",
    )
    errors: str = option(
        "", variable="QUIRE_BATCH_ERRORS", metavar="FILE", help="File for the failed lines that `fetch` gets."
    )
    json: bool = option(False, variable="QUIRE_BATCH_JSON", help="Print batches as JSON.")
    url: str = option(
        "http://127.0.0.1:8000", variable="QUIRE_BATCH_URL", help="URL of the server, with or without /v1."
    )
    api_key: str = option(
        "", variable="QUIRE_BATCH_API_KEY", metavar="KEY", secret=True, help="API key, sent as a bearer token."
    )


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The settings of `quire chat`, for any server that speaks the OpenAI API."""

    prompt: str = option(
        "", positional=True, variable="QUIRE_CHAT_PROMPT", help="Prompt to answer once; - reads it from standard input."
    )
    url: str = option(
        "http://127.0.0.1:8000", variable="QUIRE_CHAT_URL", help="URL of the server, with or without /v1."
    )
    model: str = option(
        "", variable="QUIRE_CHAT_MODEL", metavar="NAME", help="Model to ask; by default the first model of the server."
    )
    system: str = option("", variable="QUIRE_CHAT_SYSTEM", metavar="TEXT", help="System message of the conversation.")
    temperature: float | None = option(
        None,
        minimum=0,
        maximum=2,
        variable="QUIRE_CHAT_TEMPERATURE",
        help="Sampling temperature; 0 is greedy. If not set, the server's default.",
    )
    top_p: float | None = option(
        None,
        minimum=0,
        maximum=1,
        variable="QUIRE_CHAT_TOP_P",
        help="Nucleus sampling. If not set, the server's default.",
    )
    max_tokens: int | None = option(
        None, minimum=1, variable="QUIRE_CHAT_MAX_TOKENS", metavar="N", help="Longest answer in tokens."
    )
    seed: int | None = option(
        None, minimum=0, variable="QUIRE_CHAT_SEED", help="Seed of the sampling: an equal seed gives an equal answer."
    )
    tools: bool = option(
        False,
        variable="QUIRE_CHAT_TOOLS",
        help="Offer the model a calculator, run its calls, and send the results back.",
    )
    tool_choice: Literal["auto", "required"] = option(
        "auto",
        variable="QUIRE_CHAT_TOOL_CHOICE",
        help="With --tools: auto lets the model decide; required makes each answer begin with a call, even of a model "
        "that was never trained to use tools.",
    )
    json: bool = option(
        False, variable="", help="Print the answer to one prompt as JSON, with the conversation and its times."
    )
    api_key: str = option(
        "", variable="QUIRE_CHAT_API_KEY", metavar="KEY", secret=True, help="API key, sent as a bearer token."
    )


@dataclass(frozen=True, kw_only=True)
class CompletionSettings:
    """The settings of `quire completion`."""

    shell: str = option(
        "bash",
        positional=True,
        variable="",
        metavar="SHELL",
        choices=("bash", "zsh", "fish"),
        help="Shell of the script.",
    )


# The settings of all commands. A `QUIRE_*` variable must name one of these settings.
ALL_SETTINGS = (
    ServeSettings,
    GatewaySettings,
    WorkerSettings,
    ChatSettings,
    BenchSettings,
    DeadSettings,
    ParkedSettings,
    BatchCommandSettings,
)

"""The subcommands of `quire`: finds one, reads its settings, runs it, and renders every failure as one line.

A command imports what it needs when it runs: `quire --help` is instant, and `quire gateway` never loads torch.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.ops.cli.interrupts import EXIT_CODE, raise_at_ctrl_c
from quire.ops.errors import CommandError
from quire.shared.settings import FROM_FLAGS, SettingError, load, options, refuse_flag, with_sources

HELP = """\
usage: quire COMMAND [options]

Serve large language models over the OpenAI API. Requests wait in Redis, so that an accepted one survives the death of
any process.

commands:
{commands}

  quire COMMAND --help   Show the options of a command. Each can also be set as QUIRE_NAME in the environment.
  quire --version        Show the version.

examples:
  quire serve                                      The model that comes with Quire, at http://127.0.0.1:8000
  quire serve Qwen/Qwen2.5-0.5B-Instruct           Another one, by its Hugging Face name
  quire serve --workers 2 --port 9000 ./my-model   A local folder, two replicas
  quire chat                                       Talk to it"""


@dataclass(frozen=True)
class Command:
    """One subcommand. `settings` and `run` import what they need when they are called."""

    summary: str
    description: str
    examples: tuple[str, ...]
    settings: Callable[[], type]
    run: Callable[[Any, Mapping[str, str]], int]


def _serve_settings() -> type:
    from quire.ops.cli.settings import ServeSettings

    return ServeSettings


def _chat_settings() -> type:
    from quire.ops.cli.settings import ChatSettings

    return ChatSettings


def _gateway_settings() -> type:
    from quire.gateway.settings import GatewaySettings

    return GatewaySettings


def _worker_settings() -> type:
    from quire.worker.settings import WorkerSettings

    return WorkerSettings


def _run_serve(settings: Any, environ: Mapping[str, str]) -> int:
    from quire.ops.local.launcher import serve

    return serve(settings, environ, known_settings())


def _run_chat(settings: Any, environ: Mapping[str, str]) -> int:
    from quire.ops.cli.chat import chat

    raise_at_ctrl_c()
    return chat(settings, environ)


def _dead_settings() -> type:
    from quire.ops.cli.settings import DeadSettings

    return DeadSettings


def _run_dead(settings: Any, environ: Mapping[str, str]) -> int:
    from quire.ops.cli.dead_letters import dead

    raise_at_ctrl_c()
    return dead(settings, environ)


def _bench_settings() -> type:
    from quire.ops.loadgen.settings import BenchSettings

    return BenchSettings


def _run_bench(settings: Any, environ: Mapping[str, str]) -> int:
    from quire.ops.loadgen.command import bench

    raise_at_ctrl_c()
    return bench(settings, environ)


def _run_gateway(settings: Any, environ: Mapping[str, str]) -> int:
    from quire.gateway.main import run

    return run(_with_model(settings))


def _run_worker(settings: Any, environ: Mapping[str, str]) -> int:
    from quire.worker.main import run

    return run(_with_model(settings))


def _with_model(settings: Any) -> Any:
    from dataclasses import replace

    from quire.ops.paths import resolve_model

    return replace(settings, model=resolve_model(settings.model))


COMMANDS = {
    "serve": Command(
        "Start Redis, workers and a gateway on this machine.",
        "Serve a model on this machine: an embedded Redis, workers and a gateway, until Ctrl-C. The flags of "
        "`quire gateway` and `quire worker` may be given too, and reach the services as they are.",
        (
            "quire serve",
            "quire serve Qwen/Qwen2.5-0.5B-Instruct --served-model-name qwen",
            "quire serve ./my-model --workers 2 --port 9000 --max-num-seqs 32",
            "quire serve --redis-url redis://10.0.0.5:6379/0 --host 0.0.0.0",
            "QUIRE_PORT=0 quire serve    # any free port; the line `ready: URL` on standard output names it",
        ),
        _serve_settings,
        _run_serve,
    ),
    "gateway": Command(
        "Start one gateway: HTTP in front, Redis behind.",
        "Start one gateway. It holds no state: start any number of them in front of the same Redis.",
        (
            "quire gateway --redis-url redis://127.0.0.1:6379/0 --port 8000",
            "quire gateway ./my-model --host 0.0.0.0",
        ),
        _gateway_settings,
        _run_gateway,
    ),
    "worker": Command(
        "Start one worker: a model that takes requests from Redis.",
        "Start one worker: a replica of the model that takes requests from Redis as it has room for them.",
        (
            "quire worker --redis-url redis://127.0.0.1:6379/0",
            "quire worker ./my-model --dtype bfloat16 --worker-id worker-2",
            "quire worker ./large-model --device cuda --tensor-parallel-size 4    # shared by four GPUs",
        ),
        _worker_settings,
        _run_worker,
    ),
    "chat": Command(
        "Talk to a server in the terminal.",
        "Talk to any server that speaks the OpenAI API. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the "
        "commands. With a prompt, or with input from a pipe, it answers once and leaves.",
        (
            "quire chat",
            "quire chat 'Tell me a story about a fox.' --max-tokens 100",
            "quire chat --url http://127.0.0.1:9000 --system 'Answer in one sentence.' --temperature 0",
            "git diff | quire chat --system 'Explain this change.'",
        ),
        _chat_settings,
        _run_chat,
    ),
    "bench": Command(
        "Measure a server: throughput, latency, goodput.",
        "Send load to any server that speaks the OpenAI API, and measure what its clients would see: time to the first "
        "token (TTFT), time per token after it (TPOT), gaps between chunks (ITL), time to the end (E2E), throughput, "
        "and goodput under limits. With --against, two servers get the same requests, in blocks that alternate. "
        "Ctrl-C ends it with what was measured so far. Exit code 1 if a request failed.",
        (
            "quire bench",
            "quire bench http://127.0.0.1:9000 --shape alpaca --rate 5 --duration-s 60 --slo ttft=500ms,tpot=50ms",
            "quire bench --shape fixed --input-tokens 128 --output-tokens 64 --concurrency 32 --requests 256",
            "quire bench --endpoint chat --tokenizer ./my-model --json result.json --html report.html",
            "quire bench --url http://127.0.0.1:8000 --against http://127.0.0.1:8101 --rounds 6",
        ),
        _bench_settings,
        _run_bench,
    ),
    "dead": Command(
        "Look at requests that were given up.",
        "Requests with which three workers died, one after the other, are given up: they are here, to look at, to "
        "queue again (as new requests, whose output stays in Redis for ten minutes) or to drop.",
        (
            "quire dead",
            "quire dead show --entry 1763740800000-0",
            "quire dead retry --entry 1763740800000-0 --redis-url redis://127.0.0.1:6379/0",
            "quire dead --state-dir ~/quire-state            # of a `quire serve` with this --state-dir",
            "docker compose exec gateway quire-start dead    # of the stack in containers",
        ),
        _dead_settings,
        _run_dead,
    ),
}


def run(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run `quire` with these arguments, by default those of the process.

    Returns the exit code: 0, 1 for a failure, 2 for a wrong setting, 130 for Ctrl-C.
    """
    try:
        code = _run(argv, environ)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `quire --help | head`: the reader has gone; the rest of the buffer has no place to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str] | None, environ: Mapping[str, str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    environ = dict(os.environ if environ is None else environ)
    prog = "quire"
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            width = max(map(len, COMMANDS))
            print(HELP.format(commands="\n".join(f"  {name:<{width}}  {c.summary}" for name, c in COMMANDS.items())))
            return 0 if words else 2
        if words[0] in ("-V", "--version", "version"):
            print(f"quire {_version()}")
            return 0
        command = COMMANDS.get(words[0])
        if command is None:
            nearest = difflib.get_close_matches(words[0], COMMANDS, n=1)
            remedy = f"did you mean `quire {nearest[0]}`?" if nearest else "give one of " + ", ".join(COMMANDS)
            raise SettingError(f"there is no command {words[0]!r}: {remedy}")
        prog = f"quire {words[0]}"
        arguments = words[1:]
        cls = command.settings()
        if words[0] == "serve":
            arguments, environ = pass_through(cls, arguments, environ)
        known = known_settings()
        description, examples = command.description, command.examples
        settings: Any = load(
            cls, arguments, environ, prog=prog, description=description, examples=examples, known=known
        )
        try:
            return command.run(settings, environ)
        except (SettingError, CommandError) as error:
            error.args = (with_sources(str(error), settings, environ),)
            raise
    except SettingError as error:
        return _fail(prog, error, 2)
    except CommandError as error:
        return _fail(prog, error, error.exit_code)
    except KeyboardInterrupt:
        return EXIT_CODE
    except BrokenPipeError:
        raise
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except Exception as error:
        if environ.get("QUIRE_LOG_LEVEL") == "debug":
            traceback.print_exc()
        if isinstance(error, ConnectionError | ModuleNotFoundError):
            return _fail(prog, _explain(error), 1)
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        detail = f"{type(error).__name__}: {error} (at {place}; QUIRE_LOG_LEVEL=debug shows the way there)"
        return _fail(prog, f"unexpected failure, {detail}", 1)


def known_settings() -> list[type]:
    """The settings of all commands: together they are what `QUIRE_*` variables may name."""
    return [command.settings() for command in COMMANDS.values()]


def pass_through(cls: type, words: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Take the flags of gateway and worker out of those of `quire serve`, as environment variables for the services."""
    own = {flag for item in options(cls) for flag in item.flags}
    services = (_gateway_settings(), _worker_settings())
    theirs = {flag: item for service in services for item in options(service) for flag in item.flags}
    rest, lifted, flags = [], dict(environ), []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            rest += [word, *words]
            break
        flag, equals, text = word.partition("=")
        item = theirs.get(flag)
        if flag in own or item is None:
            if flag.startswith("--") and flag not in (*own, "--help"):
                refuse_flag(flag, [*own, *theirs], "quire serve")
            rest.append(word)
            continue
        flags.append(item.variable)
        if item.kind is bool:
            lifted[item.variable] = "true" if flag == item.flags[0] else "false"
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise SettingError(f"{item.label}: {flag} needs a value; {item.remedy()}")
            text = words.pop(0)
        item.parse(text, flag)
        lifted[item.variable] = text
    return rest, lifted | {FROM_FLAGS: " ".join(flags)}


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"the Python package {error.name} is missing: `make setup` installs everything"
    return " ".join(str(error).split())


def _fail(prog: str, error: object, code: int) -> int:
    print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("quire")
    except PackageNotFoundError:
        return "0 (not installed)"

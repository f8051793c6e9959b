"""The subcommands of `quire`: the table of them, and `run`, which finds the command that was asked for and runs it.

A command imports what it needs when it runs: `quire --help` is instant, and `quire gateway` never loads torch.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.gateway.features.admin.commands import DEAD_LETTERS
from quire.gateway.features.keys.commands import KEYS, USAGE
from quire.gateway.features.parking.commands import PARKING
from quire.gateway.server.commands import GATEWAY
from quire.ops.cli.help_search import print_matches
from quire.ops.cli.service_flags import lift_service_flags
from quire.ops.cli.settings import (
    ALL_SETTINGS,
    AddModel,
    BatchCommandSettings,
    ChatSettings,
    CompletionSettings,
    DeadSettings,
    KeysOfStateFolder,
    ListModels,
    ModelsOfFolder,
    ParkedSettings,
    RemoveModel,
    ReplayedSettings,
    ServeSettings,
    of_state_folder,
)
from quire.ops.loadgen.settings import BenchSettings
from quire.ops.watch.commands import DOCTOR, PS, STOP, TOP, TRACE
from quire.shared.config.command_line import Command, CommandGroup, report_failures, run_command, table
from quire.shared.config.settings import SettingError, help_search, wrap
from quire.shared.process.version import installed_version
from quire.worker.commands import WORKER
from quire.worker.replay.commands import REPLAY

DESCRIPTION = (
    "Serve large language models over the OpenAI API. Requests wait in Redis, so that an accepted request survives the "
    "death of any one process."
)
HELP = """\
usage: quire COMMAND [options]

{description}

commands:
{commands}

{notes}

examples:
  quire serve                                      Serve the model that comes with Quire, at http://127.0.0.1:8000
  quire serve Qwen/Qwen2.5-0.5B-Instruct           Serve another model, by its Hugging Face name
  quire serve ggml-org/gemma-3-1b-it-GGUF:Q4_K_M   Serve one quantisation of a repository of GGUF files
  quire serve --workers 2 --port 9000 ./my-model   Serve a local folder with two replicas
  quire chat                                       Talk to the model"""


NOTES = {
    "quire COMMAND --help": "Show the options of a command, each with its variable in the environment if it has one.",
    "quire --help=WORDS": "Show the options of all commands whose names or texts have these words.",
    "quire --version": "Show the version.",
}


def _serve(settings: ServeSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.local.launcher import serve

    return serve(settings, environ)


def _chat(settings: ChatSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.cli.chat import chat

    return chat(settings, environ)


def _batch(settings: BatchCommandSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.cli.batches import batch

    return batch(settings, environ)


def _bench(settings: BenchSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.loadgen.command import bench

    return bench(settings, environ)


def _dead(settings: DeadSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.cli.redis_commands import dead

    return dead(settings, environ)


def _parking(settings: ParkedSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.cli.redis_commands import parking

    return parking(settings, environ)


def _replay(settings: ReplayedSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.cli.redis_commands import replay

    return replay(settings, environ)


def _keys(settings: KeysOfStateFolder, environ: Mapping[str, str]) -> int:
    from quire.ops.cli.redis_commands import keys

    return keys(settings, environ)


def _models(settings: ModelsOfFolder, environ: Mapping[str, str]) -> int:
    from quire.ops.cli.model_folder import run

    return run(settings, environ)


def _completion(settings: CompletionSettings, environ: Mapping[str, str]) -> int:
    from quire.ops.cli.shell_completion import script

    print(script(settings.shell, COMMANDS))
    return 0


def _of_state_folder(command: Command[Any]) -> Command[Any]:
    """Return a command on keys that finds the Redis of a state folder."""
    return replace(command, settings=of_state_folder(command.settings), run=_keys)


COMMANDS: dict[str, Command[Any] | CommandGroup] = {
    "serve": Command(
        "Start Redis, workers and gateways on this machine.",
        "Serve a model on this machine: an embedded Redis, workers and gateways, until Ctrl-C. The flags of "
        "`quire gateway` and `quire worker` are accepted too, and are passed on to these processes.",
        (
            "{prog}",
            "{prog} Qwen/Qwen2.5-0.5B-Instruct --served-model-name qwen",
            "{prog} ./my-model --workers 2 --gateways 2 --port 9000 --max-num-seqs 32",
            "{prog} --models-dir ./models --models-max 2    # every model of a folder, loaded when calls ask for it",
            "{prog} --redis-url redis://10.0.0.5:6379/0 --host 0.0.0.0",
            "QUIRE_PORT=0 {prog}    # any free port; the line `ready: URL` on standard output names it",
        ),
        ServeSettings,
        _serve,
    ),
    "ps": PS,
    "stop": STOP,
    "top": TOP,
    "trace": TRACE,
    "doctor": DOCTOR,
    "gateway": GATEWAY,
    "worker": WORKER,
    "chat": Command(
        "Talk to a server in the terminal.",
        "Talk to any server that speaks the OpenAI API. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the "
        "commands. With a prompt, or with input from a pipe, it answers once and leaves.",
        (
            "{prog}",
            "{prog} 'Tell me a story about a fox.' --max-tokens 100",
            "{prog} --url http://127.0.0.1:9000 --system 'Answer in one sentence.' --temperature 0",
            "git diff | {prog} --system 'Explain this change.'",
            "{prog} --tools 'How much is 17 * 23?'    # the model may call a calculator",
            "{prog} --tools --tool-choice required 'How much is 17 * 23?'    # for any model, the demo model too",
        ),
        ChatSettings,
        _chat,
    ),
    "batch": Command(
        "Submit files of calls, follow them, and fetch their output.",
        "Run whole files of calls on any server with OpenAI's files and batches. Each line of the file is a call: "
        '{"custom_id": ..., "method": "POST", "url": ..., "body": ...}. The exit code is 1 if the batch '
        "failed or has expired.",
        (
            "{prog} submit --file calls.jsonl --wait",
            "{prog}                                          # the newest batches",
            "{prog} status --id batch_0123456789abcdef0123456789abcdef --wait",
            "{prog} fetch --id batch_0123456789abcdef0123456789abcdef --output answers.jsonl --errors failed.jsonl",
            "{prog} cancel --id batch_0123456789abcdef0123456789abcdef",
            "{prog} submit --file calls.jsonl --completion-window 7d --metadata job=nightly --url http://gpu-host:8000",
        ),
        BatchCommandSettings,
        _batch,
    ),
    "bench": Command(
        "Measure a server: throughput, latency, goodput.",
        "Send load to any server that speaks the OpenAI API, and measure what its clients would see: time to the first "
        "token (TTFT), time per token after it (TPOT), gaps between chunks (ITL), time to the end (E2E), throughput, "
        "and goodput under limits. With --against, two servers get the same requests, in blocks that alternate. "
        "Ctrl-C ends the run and reports what was measured so far. The exit code is 1 if a request failed.",
        (
            "{prog}",
            "{prog} http://127.0.0.1:9000 --shape alpaca --rate 5 --duration-s 60 --slo ttft=500ms,tpot=50ms",
            "{prog} --shape fixed --input-tokens 128 --output-tokens 64 --concurrency 32 --requests 256",
            "{prog} --endpoint chat --tokenizer ./my-model --json result.json --html report.html",
            "{prog} --url http://127.0.0.1:8000 --against http://127.0.0.1:8101 --rounds 6",
        ),
        BenchSettings,
        _bench,
    ),
    "keys": replace(
        KEYS,
        examples=(
            *KEYS.examples,
            "{prog} list --state-dir ~/quire-state    # of a `quire serve` with this --state-dir, running or not",
            "docker compose exec gateway quire-start keys create    # of the stack in containers",
        ),
        commands={name: _of_state_folder(command) for name, command in KEYS.commands.items()},
    ),
    "usage": _of_state_folder(USAGE),
    "dead": Command(
        DEAD_LETTERS.summary,
        DEAD_LETTERS.description,
        (
            *DEAD_LETTERS.examples,
            "{prog} --state-dir ~/quire-state            # of a `quire serve` with this --state-dir",
            "docker compose exec gateway quire-start dead    # of the stack in containers",
        ),
        DeadSettings,
        _dead,
    ),
    "parking": Command(
        PARKING.summary,
        PARKING.description,
        (
            *PARKING.examples,
            "{prog} --state-dir ~/quire-state            # of a `quire serve` with this --state-dir",
            "docker compose exec gateway quire-start parking park    # of the stack in containers",
        ),
        ParkedSettings,
        _parking,
    ),
    "models": CommandGroup(
        "List, add or remove the models of a folder.",
        "The models of a folder that `quire serve --models-dir` serves. A running server takes up a new model within a "
        "second, and lets go of one that is removed.",
        (
            "{prog} list --models-dir ./models",
            "{prog} add Qwen/Qwen2.5-0.5B-Instruct --name qwen --models-dir ./models",
            "QUIRE_MODELS_DIR=./models {prog} remove qwen",
        ),
        {
            "list": Command(
                "List all models.",
                "Print a line for each model: its name, the size of its weights, its architecture, whether it is "
                "loaded, and when it was last used. A model that cannot be served has its reason below it.",
                ("{prog} --models-dir ./models", "{prog} --models-dir ./models --json"),
                ListModels,
                _models,
            ),
            "add": Command(
                "Put a model into the folder.",
                "Copy a model folder or a GGUF file into the folder, or download a model from the Hugging Face Hub and "
                "link it. A model that cannot be served is refused with the reason.",
                (
                    "{prog} ./my-model --models-dir ./models",
                    "{prog} Qwen/Qwen2.5-0.5B-Instruct --name qwen --models-dir ./models",
                    "{prog} /data/llama.gguf --mode link --models-dir ./models",
                ),
                AddModel,
                _models,
            ),
            "remove": Command(
                "Remove a model from the folder.",
                "Delete a model of the folder, or the link to it. Its open calls get up to 30 seconds to end; new ones "
                "get status 404.",
                ("{prog} qwen --models-dir ./models", "{prog} qwen --yes --models-dir ./models"),
                RemoveModel,
                _models,
            ),
        },
        "list",
    ),
    "replay": Command(REPLAY.summary, REPLAY.description, REPLAY.examples, ReplayedSettings, _replay),
    "completion": Command(
        "Print the completion of commands and flags for a shell.",
        "Print a script for bash, zsh or fish that completes the commands of `quire`, their flags and the values of "
        "flags. It is made from the same declarations as the help.",
        (
            'eval "$({prog} bash)"    # in ~/.bashrc',
            'eval "$({prog} zsh)"     # in ~/.zshrc, after compinit',
            "{prog} fish > ~/.config/fish/completions/quire.fish",
        ),
        CompletionSettings,
        _completion,
    ),
}


def single_commands() -> dict[str, Command[Any]]:
    """Return every command by its words after `quire`, such as `keys create`."""
    commands: dict[str, Command[Any]] = {}
    for name, command in COMMANDS.items():
        if isinstance(command, CommandGroup):
            commands |= {f"{name} {inner}": subcommand for inner, subcommand in command.commands.items()}
        else:
            commands[name] = command
    return commands


def run(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run `quire` with these arguments, by default those of the process.

    Return the exit code: 0, 1 for a failure, 2 for a wrong setting, 130 for Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    variables = dict(os.environ if environ is None else environ)
    if search := help_search(words):
        return report_failures("quire", variables, lambda: print_matches(single_commands(), words, search))
    if words and (command := COMMANDS.get(words[0])):
        name, arguments = words[0], words[1:]
        return report_failures(f"quire {name}", variables, lambda: _run(name, command, arguments, variables))
    return report_failures("quire", variables, lambda: _run_without_command(words))


def _run(name: str, command: Command[Any] | CommandGroup, arguments: list[str], environ: dict[str, str]) -> int:
    if isinstance(command, Command) and command.settings is ServeSettings:
        arguments, environ = lift_service_flags(arguments, environ)
    return run_command(f"quire {name}", command, arguments, environ, ALL_SETTINGS)


def _run_without_command(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        rows = {name: command.summary for name, command in COMMANDS.items()}
        print(HELP.format(description=wrap(DESCRIPTION), commands=table(rows), notes=table(NOTES)))
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"quire {installed_version('0 (not installed)')}")
        return 0
    nearest = difflib.get_close_matches(words[0], COMMANDS, n=1)
    remedy = f"did you mean `quire {nearest[0]}`?" if nearest else "give one of " + ", ".join(COMMANDS)
    raise SettingError(f"there is no command {words[0]!r}: {remedy}")

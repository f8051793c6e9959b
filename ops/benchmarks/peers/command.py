"""`make bench`: measure this checkout, alone or compared with other servers on this machine."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
from pathlib import Path

from quire.ops.benchmarks.peers import results
from quire.ops.benchmarks.peers.programs import SERVED_NAME, LlamaCpp, Quire, Vllm, find_program
from quire.ops.benchmarks.peers.rounds import Side, measure
from quire.ops.benchmarks.peers.tables import tables
from quire.ops.benchmarks.stack.checkpoint import make_checkpoint
from quire.ops.benchmarks.stack.load import CASES
from quire.ops.cli.server_url import parse_url
from quire.shared.config.command_line import CommandError
from quire.shared.config.settings import SettingError

PEERS = ("llamacpp", "vllm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a comparison to those of `make bench`."""
    group = parser.add_argument_group("rounds, and other servers, which run in turns")
    group.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=URL]",
        help=f"server to compare with, of {', '.join(PEERS)}: its program is started, or the one at URL is used",
    )
    group.add_argument("--rounds", type=int, default=4, help="rounds of each case; every server runs once per round")
    group.add_argument("--seed", type=int, help="of all prompts; a random one by default, which the result names")
    group.add_argument("--json", type=Path, help="file for the result; by default one in the folder of results")
    group.add_argument("--append", action="store_true", help="add to the measurements of the file instead of replacing")
    group.add_argument("--label", default="Comparison", help="heading of the table; equal headings make one table")
    group.add_argument("--dtype", help="type of Quire's weights, passed to `quire serve`")
    group.add_argument("--quantization", help="quantization of Quire's weights, passed to `quire serve`")
    group.add_argument("--kv-cache-dtype", help="type of Quire's KV cache, passed to `quire serve`")
    group.add_argument(
        "--quire-args",
        action="append",
        default=[],
        metavar="[LABEL:]FLAGS",
        help="flags of one more side of Quire, added to those above; several times to compare settings. LABEL is its "
        "name in the table, by default its flags",
    )
    group.add_argument("--gguf", type=Path, help="the model for llama.cpp, a GGUF file of any type")
    group.add_argument("--llamacpp", default="", metavar="PATH", help="llama-server; also LLAMA_SERVER, or on PATH")
    group.add_argument(
        "--llamacpp-args",
        action="append",
        metavar="FLAGS",
        help="flags of llama-server, instead of those that are best for the case; several times to compare flags",
    )
    group.add_argument("--vllm", default="", metavar="PATH", help="vllm; also VLLM, or on PATH")
    group.add_argument("--vllm-args", default="", help="further flags of vLLM")
    group.add_argument("--no-quire", action="store_true", help="measure only the peers, such as to try their flags")


def compare(args: argparse.Namespace, output: Path) -> int:
    """Run the comparison, print its table and write the result. Return the exit code: 2 for a wrong setting.

    output: the file without --json.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
            return _compare(args, args.json or output, Path(folder))
    except (CommandError, SettingError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingError) else 1


def _compare(args: argparse.Namespace, output: Path, folder: Path) -> int:
    cases = [CASES[name] for name in args.cases.split(",")]
    earlier = results.read(output) if args.append and output.exists() else []
    if args.rounds < 1:
        raise SettingError(f"--rounds is {args.rounds}: it must be at least 1")
    made = Path(args.model) if args.model else make_checkpoint(folder / args.shape, args.shape)
    sides = [side for given in args.peer for side in peer_sides(given, args, made)]
    if not args.no_quire:
        sides = [*quire_sides(args, made, folder), *sides]
    elif args.quire_args:
        raise SettingError("--quire-args needs Quire: leave --no-quire out")
    if not sides:
        raise SettingError("--no-quire needs another server: give --peer NAME")
    names = [side.name for side in sides]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        flag = "--quire-args" if twice.startswith("quire") else "--peer"
        raise SettingError(f"{flag} names a server twice: {twice!r}; give each its own label or flags")
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    vocab_size = json.loads((made / "config.json").read_text())["vocab_size"]
    measured = measure(sides, cases, args.rounds, seed, vocab_size, lambda line: print(line, flush=True))
    this = results.measurement(args.label, made.name, args.rounds, measured)
    results.write(output, [*earlier, this])
    print(f"\n{tables([this])}\n\nwritten: {output}")
    return 0


def peer_sides(given: str, args: argparse.Namespace, model: Path) -> list[Side]:
    """Return the servers of one --peer, more than one only with several --llamacpp-args.

    Raise SettingError and CommandError, each with the remedy.
    """
    name, _, url = given.partition("=")
    if name not in PEERS:
        raise SettingError(f"--peer is {name!r}: it must be one of {', '.join(PEERS)}")
    if url:
        base = parse_url(url, f"--peer {name}=").base.removesuffix("/v1")
        return [Side(name, None, base, SERVED_NAME)]
    if not args.model:
        raise SettingError(f"--peer {name} needs --model, a checkpoint that the peer can read, too")
    if name == "vllm":
        path = find_program(name, args.vllm, "VLLM", "vllm", os.environ)
        return [Side(name, Vllm(path, model, shlex.split(args.vllm_args)))]
    path = find_program(name, args.llamacpp, "LLAMA_SERVER", "llama-server", os.environ)
    if args.gguf is None:
        raise SettingError("--peer llamacpp needs --gguf FILE, the model as a GGUF file")
    if not args.gguf.is_file():
        raise SettingError(f"--gguf: there is no {str(args.gguf)!r}; give the model as a GGUF file")
    gguf = args.gguf.absolute()
    if args.llamacpp_args is None:
        return [Side(name, LlamaCpp(path, gguf, None))]
    several = len(args.llamacpp_args) > 1
    return [
        Side(f"{name} {flags}".strip() if several else name, LlamaCpp(path, gguf, shlex.split(flags)))
        for flags in args.llamacpp_args
    ]


def quire_sides(args: argparse.Namespace, model: Path, folder: Path) -> list[Side]:
    """Return a side of Quire for each --quire-args, or one without flags. Each has a folder of its own for its state.

    Raise SettingError for a side without flags and label.
    """
    common = quire_arguments(args)
    if not args.quire_args:
        return [Side("quire", Quire(model, common, folder / "state"))]
    sides = []
    for number, given in enumerate(args.quire_args):
        label, flags = split_label(given)
        if not label:
            raise SettingError(f"--quire-args is {given!r}: it must have flags, or a label before a colon")
        sides.append(Side(f"quire {label}", Quire(model, common + shlex.split(flags), folder / f"state-{number}")))
    return sides


def split_label(given: str) -> tuple[str, str]:
    """Return the label and the flags of one --quire-args. A label has no dash at its start and no space."""
    label, colon, flags = given.partition(":")
    if colon and label and not label.startswith("-") and " " not in label:
        return label, flags.strip()
    return given.strip(), given.strip()


def quire_arguments(args: argparse.Namespace) -> list[str]:
    """Return the arguments of `quire serve`: those for types, and --serve-args."""
    arguments = []
    for flag in ("dtype", "quantization", "kv_cache_dtype"):
        if value := getattr(args, flag):
            arguments += [f"--{flag.replace('_', '-')}", value]
    return arguments + shlex.split(args.serve_args)

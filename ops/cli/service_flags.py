"""Flags of the gateway and the worker on the command line of `quire serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.shared.config.settings import FROM_FLAGS, SettingError, options, refuse_flag
from quire.worker.settings import WorkerSettings


def lift_service_flags(words: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Turn flags that only the gateway or the worker has into environment variables for these processes.

    Return the arguments that are left for `quire serve`, and the environment with the variables. Raise SettingError
    for an unknown flag or a wrong value.
    """
    own = {flag for item in options(ServeSettings) for flag in item.flags}
    of_services = {
        flag: item for cls in (GatewaySettings, WorkerSettings) for item in options(cls) for flag in item.flags
    }
    rest: list[str] = []
    lifted, from_flags = dict(environ), []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            rest += [word, *left]
            break
        flag, equals, text = word.partition("=")
        item = of_services.get(flag)
        if flag in own or item is None:
            if flag.startswith("--") and flag not in (*own, "--help"):
                refuse_flag(flag, [*own, *of_services], "quire serve")
            rest.append(word)
            continue
        from_flags.append(item.variable)
        if item.kind is bool:
            lifted[item.variable] = "true" if flag == item.flags[0] else "false"
            continue
        if not equals:
            if not left or left[0].startswith("--"):
                raise SettingError(f"{item.label}: {flag} needs a value; {item.remedy()}")
            text = left.pop(0)
        item.parse(text, flag)
        is_again = item.variable in from_flags[:-1]
        lifted[item.variable] = item.joined(lifted[item.variable] if is_again else None, text)
    return rest, lifted | {FROM_FLAGS: " ".join(from_flags)}

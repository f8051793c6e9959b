"""The commands about API keys: what their `--help` says, and which code runs them."""

from __future__ import annotations

from collections.abc import Mapping

from quire.gateway.features.keys.key_settings import (
    AuditKeys,
    BackUpKeys,
    CreateKey,
    KeyRedis,
    LimitAccount,
    ListKeys,
    RestoreKeys,
    RevokeKey,
    RotateKey,
    ShowAccount,
    UsageSettings,
)
from quire.shared.config.command_line import Command, CommandGroup


def run_keys(settings: KeyRedis, environ: Mapping[str, str]) -> int:
    """Carry out one command on API keys."""
    from quire.gateway.features.keys.api_keys import run

    return run(settings, environ)


USAGE = Command(
    "Print requests, tokens and costs by day, key and model.",
    "The usage of API keys as CSV, or as JSON with --json. A request counts on the day (UTC) on which it was accepted, "
    "once it has ended.",
    ("{prog}", "{prog} --days 1 --id 0123456789abcdef", "{prog} --json"),
    UsageSettings,
    run_keys,
)

KEYS = CommandGroup(
    "Create, list, limit, rotate, revoke or back up API keys.",
    "API keys of projects and organisations, with their limits. A secret is shown once, when it is created or rotated; "
    "Redis has only its hash. Gateways know a change within a second.",
    (
        "{prog} create --project web --name ci --requests-per-minute 60 --tokens-per-month 50000000",
        "{prog} limit 0123456789abcdef --tokens-per-minute 100000",
        "{prog} revoke 0123456789abcdef",
    ),
    {
        "list": Command(
            "List all keys.",
            "Print a line for each key: its id, organisation and project, name, state and limits.",
            ("{prog}", "{prog} --json"),
            ListKeys,
            run_keys,
        ),
        "create": Command(
            "Create a key, and print its secret once.",
            "Print the secret of a new key on standard output. The project and the organisation are made if they are "
            "new. A limit that is not given does not hold.",
            (
                "{prog} --project web --name ci --requests-per-minute 60 --tokens-per-month 50000000",
                "{prog} --name trial --expires-in-days 30 --models qwen",
            ),
            CreateKey,
            run_keys,
        ),
        "show": Command(
            "Show a key, a project or an organisation.",
            "Print an account with its limits as JSON.",
            ("{prog} 0123456789abcdef", "{prog} --organisation acme --project web"),
            ShowAccount,
            run_keys,
        ),
        "limit": Command(
            "Change the limits of a key, a project or an organisation.",
            "Change the limits that are given; the others keep their values, and 0 removes one. The limits of a key, "
            "of its project and of its organisation all hold.",
            (
                "{prog} 0123456789abcdef --tokens-per-minute 100000",
                "{prog} --organisation acme --project web --weight 300",
                "{prog} --organisation acme --tokens-per-day 10000000",
            ),
            LimitAccount,
            run_keys,
        ),
        "rotate": Command(
            "Give a key a new secret, and print it once.",
            "Print the new secret on standard output. The old one ends at once, or after --grace-s.",
            ("{prog} 0123456789abcdef --grace-s 3600",),
            RotateKey,
            run_keys,
        ),
        "revoke": Command(
            "Make a key invalid for good.",
            "Gateways refuse the key within a second, and end its open calls within a few seconds. This cannot be "
            "undone.",
            ("{prog} 0123456789abcdef",),
            RevokeKey,
            run_keys,
        ),
        "audit": Command(
            "Show who changed what, and when.",
            "Print the newest changes of accounts, a line for each.",
            ("{prog}",),
            AuditKeys,
            run_keys,
        ),
        "usage": USAGE,
        "backup": Command(
            "Write all accounts to a file.",
            "Write all accounts with their limits, the audit log and the usage to a new file, without any secret.",
            ("{prog} keys.json",),
            BackUpKeys,
            run_keys,
        ),
        "restore": Command(
            "Read the accounts of a backup.",
            "Restore a file of `backup` into a Redis without accounts. Keys keep their secrets.",
            ("{prog} keys.json",),
            RestoreKeys,
            run_keys,
        ),
    },
    default="list",
)

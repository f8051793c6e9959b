"""The limits of an API key on the parameters of a call: models, priority classes and max_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from quire.gateway.api.call import Call
from quire.gateway.api.caller import Caller
from quire.gateway.errors.api_errors import ModelNotFound, PermissionDenied, refused
from quire.shared.accounts.account import Account
from quire.shared.protocol.keys import DEFAULT_CLASS, PRIORITY_CLASSES

C = TypeVar("C", bound=Call)

# Names of the parameters of all APIs that bound an answer, and that choose a class.
_MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_CLASSES = ("priority", "service_tier")


def accounts_of(caller: Caller) -> tuple[Account, ...]:
    """Return the accounts of a caller. Only the key ring makes callers that have some."""
    return cast(tuple[Account, ...], caller.accounts)


def may_use(caller: Caller, model: str) -> bool:
    """Return True if the key of a caller may use a model."""
    return all(model in account.limits.models for account in accounts_of(caller) if account.limits.models)


def check_model(caller: Caller, model: str) -> None:
    """Raise ModelNotFound if the key of a caller may not use a model."""
    if not may_use(caller, model):
        raise ModelNotFound(
            f"The model {model[:200]!r} does not exist, or your API key has no access to it.", param="model"
        )


def restricted(caller: Caller, call: C, body: Mapping[str, Any]) -> C:
    """Return a call within the limits of its key.

    A value that the client gave is refused if it is above a limit; a default is lowered to the limit. A class above the
    default one needs a `priority` limit that grants it: it would come before the shares of all other tenants.
    Raises ApiError.
    """
    check_model(caller, call.model)
    if not caller.accounts:
        return call
    limits = [account.limits for account in accounts_of(caller)]
    most = min((limit.max_tokens for limit in limits if limit.max_tokens), default=0)
    if most and any(sampling.max_tokens > most for sampling in call.sampling):
        name = next((name for name in _MAX_TOKENS if name in body), "max_tokens")
        if call.max_tokens is not None:
            raise refused(name, f"{name} must be at most {most}, the limit of your API key.")
        if any(sampling.min_tokens > most for sampling in call.sampling):
            raise refused("min_tokens", f"min_tokens must be at most {most}, the limit of your API key.")
        lowered = tuple(replace(sampling, max_tokens=min(sampling.max_tokens, most)) for sampling in call.sampling)
        call = replace(call, sampling=lowered)
    ranks = [PRIORITY_CLASSES.index(limit.priority) for limit in limits if limit.priority]
    highest = PRIORITY_CLASSES[max(ranks)] if ranks else DEFAULT_CLASS
    if PRIORITY_CLASSES.index(call.priority) < PRIORITY_CLASSES.index(highest):
        if given := next((name for name in _CLASSES if body.get(name) not in (None, "auto", "default")), ""):
            raise PermissionDenied(
                f"{given}: your API key allows the class {highest} at most. Send that class, or ask the operator for a "
                "higher limit `priority` of the key.",
                param=given,
            )
        call = replace(call, priority=highest)
    return call

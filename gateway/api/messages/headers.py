"""The headers of the Messages API: `anthropic-version` and `anthropic-beta`. Keys (`x-api-key`) are accepted unread."""

from __future__ import annotations

import re
from collections.abc import Iterable

from aiohttp import web
from multidict import CIMultiDictProxy

from quire.gateway.api.headers import NO_EFFECT_HEADER
from quire.gateway.errors.api_errors import REQUEST_ID, refused
from quire.gateway.errors.message_errors import is_messages_path
from quire.shared.config.schema_parts import TEXT, Schema, request_parameter
from quire.shared.config.validators import shown

VERSION = "anthropic-version"
BETA = "anthropic-beta"
MAX_BETAS = 64
# The header of an answer with the id of its request.
ANSWER_ID = "request-id"

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)

_BETAS = TEXT | {"pattern": f"^{_NAME.pattern}(, ?{_NAME.pattern}){{0,{MAX_BETAS - 1}}}$"}
# By their names in /openapi.json.
PARAMETERS: Schema = {
    "AnthropicVersion": request_parameter("header", VERSION, _DATE, "any date: this server has one version of the API"),
    "AnthropicBeta": request_parameter(
        "header", BETA, _BETAS, f"names of features; the header {NO_EFFECT_HEADER} has those without effect"
    ),
}
# Betas whose request fields and answers this server has with or without the header. Every other one has no effect.
KNOWN_BETAS = frozenset(
    {
        "context-management-2025-06-27",
        "effort-2025-11-24",
        "extended-cache-ttl-2025-04-11",
        "files-api-2025-04-14",
        "fine-grained-tool-streaming-2025-05-14",
        "interleaved-thinking-2025-05-14",
        "model-context-window-exceeded-2025-08-26",
        "output-128k-2025-02-19",
        "prompt-caching-2024-07-31",
        "prompt-caching-scope-2026-01-05",
        "structured-outputs-2025-11-13",
        "structured-outputs-2025-12-15",
        "token-counting-2024-11-01",
        "tools-2024-04-04",
        "tools-2024-05-16",
    }
)


def check_headers(headers: CIMultiDictProxy[str]) -> list[str]:
    """Return the betas in the headers of a request that have no effect here. Raises InvalidRequest.

    The version may be missing: this server has one version of the API, and some clients of proxies drop the header.
    """
    for version in headers.getall(VERSION, []):
        if not _DATE.fullmatch(version):
            raise refused(VERSION, f"{VERSION} must be a date like 2023-06-01, not {shown(version)}.")
    return _without_effect(headers.getall(BETA, []))


async def add_answer_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the id of the request to every answer of the Messages API."""
    if is_messages_path(request.path) and (request_id := request.get(REQUEST_ID)):
        response.headers[ANSWER_ID] = request_id


def _without_effect(values: Iterable[str]) -> list[str]:
    betas = [beta for value in values for beta in (part.strip() for part in value.split(",")) if beta]
    if len(betas) > MAX_BETAS:
        raise refused(BETA, f"{BETA} has {len(betas)} names; at most {MAX_BETAS} are allowed.")
    for beta in betas:
        if not _NAME.fullmatch(beta):
            raise refused(
                BETA, f"{BETA} must have names of up to 100 letters, digits, '.', '_' and '-', not {shown(beta)}."
            )
    return [beta for beta in dict.fromkeys(betas) if beta not in KNOWN_BETAS]

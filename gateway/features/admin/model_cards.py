"""GET /v1/models: the model of this gateway with its limits and capabilities, in the shapes of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from quire.gateway.api.caller import caller_of
from quire.gateway.model.served_model import ServedModel
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway


def _any(model: ServedModel) -> bool:
    return True


def _chats(model: ServedModel) -> bool:
    """Return True if the model has a chat template."""
    return model.template is not None


def _ends(model: ServedModel) -> bool:
    """Return True if the model has an end token: an answer in a grammar ends where the grammar does."""
    return bool(model.eos_token_ids)


def _sees(model: ServedModel) -> bool:
    """Return True if the prompts of the model may have images."""
    return _chats(model) and model.layout is not None


def _calls_tools(model: ServedModel) -> bool:
    return _chats(model) and _ends(model) and bool(model.tool_format)


def _reasons(model: ServedModel) -> bool:
    """Return True if the reasoning of the model is told apart from its answer."""
    return _chats(model) and bool(model.shown_reasoning_format)


def _scores(model: ServedModel) -> bool:
    """Return True if the model scores pairs of texts."""
    return not isinstance(model.scoring, str)


# Features of the API, each with the models that have it.
CAPABILITIES: dict[str, Callable[[ServedModel], bool]] = {
    "beam_search": _any,
    "chat": _chats,
    "completions": _any,
    "embeddings": _any,
    "images": _sees,
    "json_object": _ends,
    "json_schema": _ends,
    "logprobs": _any,
    "messages": _chats,
    "reasoning": _reasons,
    "rerank": _scores,
    "responses": _chats,
    "resume": _any,
    "scoring": _any,
    "structured_outputs": _ends,
    "tokenize": _any,
    "tools": _calls_tools,
}

# Those that a model with a head for labels can have.
_WITHOUT_TOKENS = ("embeddings", "rerank", "tokenize")

# Settings that bound the images of a call.
IMAGE_LIMITS = ("max_images", "max_image_bytes", "max_image_pixels")


def capabilities(model: ServedModel) -> list[str]:
    """Return the names of the features that a model has, in alphabetical order."""
    names = _WITHOUT_TOKENS if model.is_classifier else CAPABILITIES
    return sorted(name for name in names if CAPABILITIES[name](model))


class ModelCards:
    """Handlers of the endpoints that describe the models of a gateway."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory
        self._may_use = directory.process.keys.may_use

    async def all(self, request: web.Request) -> web.Response:
        """GET /v1/models: each live model under all of its names that the caller may use."""
        caller = caller_of(request)
        cards: dict[str, dict[str, Any]] = {}
        for gateway in self._directory.live:
            for name in gateway.names:
                # A name that two models claim is listed for the one that gets its calls.
                if name not in cards and self._may_use(caller, name) and self._directory.find(name) is gateway:
                    cards[name] = _card(gateway, name)
        return web.json_response({"object": "list", "data": list(cards.values())})

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/models/{name}"""
        name = request.match_info["name"]
        gateway = self._directory.choose(name, caller_of(request))
        gateway.limits.check_model(name)
        return web.json_response(_card(gateway, name))


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return the card of the model, of an alias, or of one of its adapters, whose parent is the model."""
    model, limits, created = gateway.model, gateway.limits, gateway.started
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        # vLLM's: the checkpoint, here by its served name, since its folder is no concern of clients.
        "root": model.name,
        "parent": model.name if name in limits.adapters else None,
        "status": str(gateway.worker_registry.state),
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "vocab_size": limits.vocab_size,
        "max_n": limits.max_n,
        "max_prompts": limits.max_prompts,
        "max_choices": limits.max_choices,
        **{name: getattr(gateway.settings, name) if _sees(model) else None for name in IMAGE_LIMITS},
        "capabilities": capabilities(model),
        "tool_call_format": model.tool_format or None,
        "reasoning_format": model.shown_reasoning_format or None,
        "sampling_defaults": model.sampling_defaults,
        "permission": [_permission(name, created)],
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    """Return an entry that OpenAI's API once had, and that vLLM has: every client may use the model."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }

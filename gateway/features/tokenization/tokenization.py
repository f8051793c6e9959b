"""Tokens of a model without a worker, in the shapes of vLLM: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from aiohttp import web

from quire.gateway.api.caller import caller_of
from quire.gateway.api.conversation import render_prompt, unknown_variables
from quire.gateway.api.parsing import read_object
from quire.gateway.errors.api_errors import NO_EFFECT_NAMES, NotFound
from quire.gateway.features.tokenization.token_requests import read_detokenize, read_tokenize
from quire.gateway.features.tokenization.tokenizer_info import tokenizer_info
from quire.gateway.serving.dispatch import ModelDirectory, by_body
from quire.gateway.serving.service import Gateway


def routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Return the routes of the endpoints."""

    async def info(request: web.Request) -> web.Response:
        """GET /tokenizer_info: the configuration of a tokenizer, if the server shows it."""
        if not directory.process.settings.tokenizer_info:
            raise NotFound("This server does not show its tokenizer; its operator can, with --tokenizer-info.")
        name = request.query.get("model")
        gateway = directory.choose(name, caller_of(request))
        if name is not None:
            gateway.limits.check_model(name)
        return web.json_response(tokenizer_info(gateway.model))

    return [
        web.post("/tokenize", by_body(directory, tokenize)),
        web.post("/detokenize", by_body(directory, detokenize)),
        web.get("/tokenizer_info", info),
    ]


async def tokenize(gateway: Gateway, request: web.Request) -> web.Response:
    """POST /tokenize: the tokens of a text, or of a conversation as a chat renders it."""
    settings = gateway.settings
    limits, renderer = gateway.limits, gateway.renderer_for(request)
    asked = read_tokenize(await read_object(request, settings.max_body_bytes, settings.body_timeout_s))
    if asked.model:
        limits.check_model(asked.model)
    if asked.conversation is not None:
        limits.check_tools(asked.conversation.tools)
        tokens = (await render_prompt(asked.conversation, limits, renderer)).token_ids
        variables = {"chat_template_kwargs": asked.conversation.template_variables}
        request[NO_EFFECT_NAMES] = ", ".join(unknown_variables(variables, renderer.model.template))
    else:
        tokens = await renderer.prompt("prompt", asked.prompt or "", limits.max_model_len, asked.add_special_tokens)
    return web.json_response(
        {
            "count": len(tokens),
            "max_model_len": limits.max_model_len,
            "tokens": tokens,
            "token_strs": await renderer.token_strings(tokens) if asked.return_token_strs else None,
        }
    )


async def detokenize(gateway: Gateway, request: web.Request) -> web.Response:
    """POST /detokenize: the text of tokens, special tokens included."""
    settings = gateway.settings
    body = await read_object(request, settings.max_body_bytes, settings.body_timeout_s)
    model, tokens = read_detokenize(body, gateway.limits.vocab_size)
    if model:
        gateway.limits.check_model(model)
    return web.json_response({"prompt": await gateway.renderer.text(tokens)})

"""POST /tokenize and /detokenize: texts to tokens and back, as vLLM answers them. No worker takes part."""

from __future__ import annotations

from aiohttp import web

from quire.gateway.api.caller import caller_of
from quire.gateway.api.key_policy import check_model
from quire.gateway.api.parsing import read_object
from quire.gateway.api.token_requests import read_detokenize, read_tokenize
from quire.gateway.model.prompt_form import PromptForm
from quire.gateway.serving.dispatch import ModelDirectory, by_body
from quire.gateway.serving.service import Gateway


def routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Returns the routes of both endpoints."""
    return [
        web.post("/tokenize", by_body(directory, tokenize)),
        web.post("/detokenize", by_body(directory, detokenize)),
    ]


async def tokenize(gateway: Gateway, request: web.Request) -> web.Response:
    """POST /tokenize: the tokens of a text, or of a conversation as a chat renders it."""
    settings = gateway.settings
    limits, renderer = gateway.limits, gateway.renderer
    asked = read_tokenize(await read_object(request, settings.max_body_bytes, settings.body_timeout_s))
    if asked.model:
        limits.check_model(asked.model)
    check_model(caller_of(request), asked.model or limits.model)
    form = PromptForm(add_special_tokens=asked.add_special_tokens, add_generation_prompt=asked.add_generation_prompt)
    if asked.messages is not None:
        tokens = (await renderer.chat(asked.messages, limits.max_model_len, form=form)).token_ids
    else:
        tokens = await renderer.prompt("prompt", asked.prompt or "", limits.max_model_len, form)
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
    check_model(caller_of(request), model or gateway.limits.model)
    return web.json_response({"prompt": await gateway.renderer.text(tokens)})

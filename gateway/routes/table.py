"""The table of the APIs: their routes, and what the rest of the server needs of each.

A verb of a dialect is a row, as is an endpoint that only one API has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from quire.gateway.api.chat import ChatDialect
from quire.gateway.api.completions import CompletionDialect
from quire.gateway.api.messages.answer import ANSWERS as MESSAGE_ANSWERS
from quire.gateway.api.messages.answer import MessageDialect
from quire.gateway.api.messages.headers import PARAMETERS as MESSAGE_PARAMETERS
from quire.gateway.api.messages.headers import add_answer_headers
from quire.gateway.api.messages.parameters import BODIES as MESSAGE_BODIES
from quire.gateway.api.parameters import CHAT, COMPLETIONS, Body
from quire.gateway.api.responses.body import ANSWERS as RESPONSE_ANSWERS
from quire.gateway.api.responses.body import PREFIX
from quire.gateway.api.responses.parameters import BODIES as RESPONSE_BODIES
from quire.gateway.api.responses.query import PARAMETERS as RESPONSE_PARAMETERS
from quire.gateway.errors import message_errors
from quire.gateway.errors.error_responses import ErrorShape
from quire.gateway.features.conversations import conversation_calls
from quire.gateway.features.forks.fork_calls import BODIES as FORK_BODIES
from quire.gateway.features.forks.fork_calls import create_response, fork
from quire.gateway.features.rerank import score_calls
from quire.gateway.routes import message_routes, responses
from quire.gateway.routes.responses import ResponseLines, of_caller
from quire.gateway.serving import embedding_calls
from quire.gateway.serving.calls import cancel, park, resume, serve, unpark
from quire.gateway.serving.dispatch import ModelDirectory, by_body, by_charged_body, by_conversation, by_id
from quire.gateway.serving.service import Gateway
from quire.shared.config.schema_parts import id_parameter

CONVERSATION = "/v1/conversations/{id}"
# An id of a response has its prefix, so that other paths below are not taken for one.
RESPONSE = f"/v1/responses/{{id:{PREFIX}[^/]*}}"


# The verbs of a dialect that streams: method, end of the path, how the model of a request is found, and the verb.
VERBS = (
    ("POST", "", by_charged_body, serve),
    ("GET", "/{id}/stream", by_id, resume),
    ("POST", "/{id}/cancel", by_id, cancel),
    ("POST", "/{id}/park", by_id, park),
    ("POST", "/{id}/unpark", by_id, unpark),
)
DIALECTS = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": CompletionDialect(),
    "/v1/messages": MessageDialect(),
}
# The dialects whose calls can be forked.
FORKED = ("/v1/chat/completions", "/v1/completions")
# Method, path, how the model of a request is found, and the handler. A GET has no HEAD, which would attach to the
# generation request.
ROUTES: tuple[tuple[str, str, Callable[[ModelDirectory, Any], Handler], Callable[..., Any]], ...] = (
    *(
        (method, path + end, found_by, partial(verb, dialect))
        for path, dialect in DIALECTS.items()
        for method, end, found_by, verb in VERBS
    ),
    *(("POST", f"{path}/{{id}}/fork", by_id, partial(fork, DIALECTS[path])) for path in FORKED),
    ("POST", "/v1/embeddings", by_charged_body, embedding_calls.serve),
    *(("POST", path, by_charged_body, score_calls.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    *(("POST", path, by_charged_body, score_calls.score) for path in ("/score", "/v1/score")),
    ("POST", "/v1/messages/count_tokens", by_body, message_routes.count),
    ("POST", "/v1/responses", by_charged_body, of_caller(create_response)),
    ("POST", "/v1/responses/input_tokens", by_body, of_caller(responses.count)),
    ("POST", "/v1/responses/compact", by_charged_body, of_caller(responses.compact)),
    ("GET", RESPONSE, by_id, of_caller(responses.retrieve)),
    ("DELETE", RESPONSE, by_id, of_caller(responses.delete)),
    ("POST", f"{RESPONSE}/cancel", by_id, of_caller(responses.cancel)),
    ("POST", f"{RESPONSE}/fork", by_id, of_caller(fork)),
    ("POST", f"{RESPONSE}/park", by_id, of_caller(park)),
    ("POST", f"{RESPONSE}/unpark", by_id, of_caller(unpark)),
    ("GET", f"{RESPONSE}/input_items", by_id, of_caller(responses.input_items)),
    ("POST", "/v1/conversations", by_body, conversation_calls.create),
    ("GET", CONVERSATION, by_conversation, conversation_calls.retrieve),
    ("POST", CONVERSATION, by_conversation, conversation_calls.update),
    ("DELETE", CONVERSATION, by_conversation, conversation_calls.delete),
    ("GET", f"{CONVERSATION}/items", by_conversation, conversation_calls.list_items),
    ("POST", f"{CONVERSATION}/items", by_conversation, conversation_calls.add_items),
    ("GET", f"{CONVERSATION}/items/{{item_id}}", by_conversation, conversation_calls.retrieve_item),
    ("DELETE", f"{CONVERSATION}/items/{{item_id}}", by_conversation, conversation_calls.delete_item),
)
# Handlers of the signal before a response: headers that only one API has.
ON_PREPARE = (add_answer_headers,)
# For batches: what makes an endpoint for the lines of an owner at a model, besides chats and completions.
LINE_ENDPOINTS: dict[str, Callable[[Gateway, str], embedding_calls.PooledLines | ResponseLines]] = {
    "/v1/embeddings": embedding_calls.embedding_lines,
    "/v1/rerank": score_calls.rerank_lines,
    "/v1/score": score_calls.score_lines,
    "/v1/responses": ResponseLines,
}
# For /openapi.json: the parameters of each body by the name of its schema, schemas of answers, and other parameters.
BODIES = {
    "ChatCompletionRequest": Body(CHAT),
    "CompletionRequest": Body(COMPLETIONS),
    **MESSAGE_BODIES,
    **RESPONSE_BODIES,
    **embedding_calls.BODIES,
    **score_calls.BODIES,
    **conversation_calls.BODIES,
    **FORK_BODIES,
}
ANSWERS = MESSAGE_ANSWERS | RESPONSE_ANSWERS | conversation_calls.ANSWERS | score_calls.ANSWERS
PARAMETERS = {
    "ChatId": id_parameter(ChatDialect.prefix),
    "CompletionId": id_parameter(CompletionDialect.prefix),
    "MessageId": id_parameter(MessageDialect.prefix),
    **MESSAGE_PARAMETERS,
    **RESPONSE_PARAMETERS,
    **conversation_calls.PARAMETERS,
}


def routes(directory: ModelDirectory) -> list[web.RouteDef]:
    """Return the routes of the APIs for the models of a directory."""
    return [
        web.RouteDef(method, path, found_by(directory, handler), {"allow_head": False} if method == "GET" else {})
        for method, path, found_by, handler in ROUTES
    ]


def error_shape(path: str) -> ErrorShape | None:
    """Return the shape of the errors of the API at a path; None for that of OpenAI's API."""
    return message_errors.error_json if message_errors.is_messages_path(path) else None

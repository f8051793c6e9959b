"""The endpoints of the gateway: what each takes, and what it answers. Bounds and names are those of the readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.gateway.admission.terms import REQUEST_TIMEOUT, SECONDS
from quire.gateway.api import paging, resume
from quire.gateway.api.headers import CLIENT_ID, CLIENT_ID_HEADER, IDEMPOTENCY_KEY, KEY, SERVER_ID_HEADER
from quire.shared.config.schema_parts import TEXT, Schema, request_parameter
from quire.shared.config.validators import Integer, OneOf
from quire.shared.protocol.keys import USAGE_S

JSON, EVENTS, HTML = "application/json", "text/event-stream", "text/html"
FORM, BYTES = "multipart/form-data", "application/octet-stream"

# Statuses of errors that every endpoint may answer with, those of a body, and those of a call that needs Redis.
EVERY = (400, 401, 417, 431, 500)
BODY = (408, 413, 415, 503)
MODEL = (404,)
CALL = (402, 403, *BODY, *MODEL, 409, 429, 499, 504)
STORED = (404, 499, 503, 504)
# Errors of a body that no worker sees, and of a record that is looked up in Redis.
AT_ONCE = (*BODY, *MODEL)
LOOKED_UP = (404, 503)
# The headers of new calls, and those of the Messages API.
NEW = ("IdempotencyKey", "RequestTimeout", "Traceparent")
VERSIONS = ("AnthropicVersion", "AnthropicBeta")


# By their names in the document; features add their own.
PARAMETERS: Schema = {
    **paging.PARAMETERS,
    **resume.PARAMETERS,
    "ModelName": request_parameter("path", "name", TEXT, "the name of the model"),
    "Days": request_parameter("query", "days", Integer(1, USAGE_S // 86_400), "days, today included"),
    "UsageFormat": request_parameter("query", "format", OneOf(("json", "csv")), "by default `json`; `csv` for a table"),
    "IdempotencyKey": request_parameter(
        "header", IDEMPOTENCY_KEY, KEY, "calls with the same key, path and body are one call"
    ),
    "RequestTimeout": request_parameter(
        "header", REQUEST_TIMEOUT, SECONDS, "the deadline in seconds, if the body has no `timeout`"
    ),
    "Traceparent": request_parameter("header", "traceparent", TEXT, "the W3C trace of the caller, if tracing is on"),
    "ClientRequestId": request_parameter(
        "header", CLIENT_ID_HEADER, CLIENT_ID, "an id of the caller: the answer and the log have it"
    ),
    "Model": request_parameter("query", "model", TEXT, "the name of a model; by default the first one"),
}
HEADERS: Schema = {
    "ClientRequestId": {"schema": TEXT, "description": "the id that the client gave, or else the server's"},
    "ServerRequestId": {"schema": TEXT, "description": "the server's id of the request, as its log has it"},
    "NoEffect": {"schema": TEXT, "description": "names of the given parameters that have no effect on this server"},
    "AnswerId": {"schema": TEXT, "description": "the id of the request, as in the Messages API"},
    "RetryAfter": {"schema": TEXT, "description": "seconds to wait before the next attempt"},
}
IDS: Schema = {
    CLIENT_ID_HEADER: {"$ref": "#/components/headers/ClientRequestId"},
    SERVER_ID_HEADER: {"$ref": "#/components/headers/ServerRequestId"},
}
# The names of headers by those of the document's headers.
HEADER_NAMES = {"AnswerId": "request-id"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path, such as `POST /v1/files/{id}`.

    answers: the name of the schema of an answer by its type; a name alone is that of JSON. errors: statuses besides
    EVERY. request: the name of the body's schema, or names with a space between; empty without a body. form: the schema
    of a body that is a form.
    error: the schema of errors. parameters: names of the document's parameters. headers: names of the document's
    headers that answers have besides the ids of the request. not_ready: the schema of an answer with the status 503
    that is not an error. success: the status and the description of an answer.
    """

    route: str
    tag: str
    summary: str
    answers: str | Mapping[str, str]
    errors: tuple[int, ...] = ()
    request: str = ""
    parameters: tuple[str, ...] = ()
    form: str = ""
    error: str = "Error"
    headers: tuple[str, ...] = ()
    not_ready: str = ""
    success: tuple[int, str] = (200, "Success")

    @property
    def method(self) -> str:
        return self.route.split()[0].lower()

    @property
    def path(self) -> str:
        return self.route.split()[1]


def _dialect(
    path: str, name: str, event: str, summary: str, call_id: str, parameters: tuple[str, ...] = (), **form: Any
) -> tuple[Endpoint, ...]:
    """Return the endpoints of a dialect: it creates calls, resumes their streams, cancels and parks them.

    path: of new calls. name: of the schema of answers, and with `Request` of bodies. event: the schema of events.
    call_id: the document's parameter that is the id of a call. parameters: of new calls. form: `error` and `headers` of
    all endpoints.
    """
    answers, given = {JSON: name, EVENTS: event}, (*parameters, *NEW)
    resume, place = "Resume a stream at any event", (call_id, "StartingAfter", "LastEventId")
    cancel, one = "Cancel a running call", (call_id,)
    return (
        Endpoint(f"POST {path}", "generation", summary, answers, CALL, f"{name}Request", given, **form),
        Endpoint(f"GET {path}/{{id}}/stream", "generation", resume, {EVENTS: event}, STORED, "", place, **form),
        Endpoint(f"POST {path}/{{id}}/cancel", "generation", cancel, "Cancellation", LOOKED_UP, "", one, **form),
        *_parking(path, call_id, **form),
    )


def _parking(path: str, call_id: str, **form: Any) -> tuple[Endpoint, ...]:
    """Return the endpoints that park a call and let it continue. The arguments are those of `_dialect`."""
    park, unpark = "Park a call: it waits with its tokens", "Let a parked call continue at its next token"
    errors = (404, 429, 503)
    form["parameters"] = (call_id,)
    return (
        Endpoint(f"POST {path}/{{id}}/park", "generation", park, "Parking", errors, **form),
        Endpoint(f"POST {path}/{{id}}/unpark", "generation", unpark, "Parking", (402, *errors), **form),
    )


def _fork(path: str, name: str, event: str, call_id: str) -> Endpoint:
    """Return the endpoint that forks the calls of a dialect. The arguments are those of `_dialect`."""
    answers, parameters = {JSON: name, EVENTS: event}, (call_id, *NEW)
    summary, body = "Continue an answer at any token with other parameters", f"{name}ForkRequest"
    return Endpoint(f"POST {path}/{{id}}/fork", "generation", summary, answers, CALL, body, parameters)


def _responses() -> tuple[Endpoint, ...]:
    """Return the endpoints of the Responses API."""
    path, one, body, id_ = "/v1/responses", "/v1/responses/{id}", "ResponseRequest", ("ResponseId",)
    answers, place = {JSON: "Response", EVENTS: "ResponseEvent"}, ("Stream", "StartingAfterNumber", "LastNumber")
    count, show = "The number of tokens of the prompt of a response", "A stored response, or its events"
    cancel, page = "Cancel a response in the background", ("ItemsLimit", "Order", "After")
    items, create = "The items before the answer", "Create a response, or fork the previous one"
    compact = "A conversation with a summary in place of its answers"
    socket, switches = "Open a WebSocket whose messages create responses", "The connection is a WebSocket"
    return (
        Endpoint(f"POST {path}", "generation", create, answers, CALL, f"{body} PreviousResponseForkRequest", NEW),
        Endpoint(f"GET {path}", "generation", socket, {}, (403, 405, 503), success=(101, switches)),
        Endpoint(f"POST {path}/input_tokens", "tokens", count, "ResponseTokens", AT_ONCE, body),
        Endpoint(
            f"POST {path}/compact", "generation", compact, "ResponseCompaction", CALL, "ResponseCompactionRequest", NEW
        ),
        Endpoint(f"GET {one}", "generation", show, answers, STORED, "", (*id_, *place)),
        Endpoint(f"POST {one}/cancel", "generation", cancel, "Response", LOOKED_UP, "", id_),
        Endpoint(f"DELETE {one}", "generation", "Delete a response", "ResponseDeletion", LOOKED_UP, "", id_),
        Endpoint(f"GET {one}/input_items", "generation", items, "ResponseItems", LOOKED_UP, "", (*id_, *page)),
        _fork(path, "Response", "ResponseEvent", *id_),
        *_parking(path, *id_),
    )


def _conversations() -> tuple[Endpoint, ...]:
    """Return the endpoints of conversations."""
    tag, path, one = "generation", "/v1/conversations", "/v1/conversations/{id}"
    items, item, name = f"{one}/items", f"{one}/items/{{item_id}}", "Conversation"
    id_, both, page = ("ConversationId",), ("ConversationId", "ItemId"), ("ItemsLimit", "Order", "After")
    write, new, changed = (*AT_ONCE, 429), "Create a conversation", "Change the metadata of a conversation"
    show, listed, added = "A conversation", "The items of a conversation", "Add items to a conversation"
    return (
        Endpoint(f"POST {path}", tag, new, name, write, "ConversationRequest"),
        Endpoint(f"GET {one}", tag, show, name, LOOKED_UP, "", id_),
        Endpoint(f"POST {one}", tag, changed, name, write, "ConversationUpdate", id_),
        Endpoint(f"DELETE {one}", tag, "Delete a conversation", "ConversationDeletion", LOOKED_UP, "", id_),
        Endpoint(f"GET {items}", tag, listed, "ResponseItems", LOOKED_UP, "", (*id_, *page)),
        Endpoint(f"POST {items}", tag, added, "ResponseItems", write, "ConversationItemsRequest", id_),
        Endpoint(f"GET {item}", tag, "One item of a conversation", "ConversationItem", LOOKED_UP, "", both),
        Endpoint(f"DELETE {item}", tag, "Delete an item of a conversation", name, LOOKED_UP, "", both),
    )


def _files_and_batches() -> tuple[Endpoint, ...]:
    """Return the endpoints of files and of batches."""
    tag, files, file, batches, batch = "batches", "/v1/files", "/v1/files/{id}", "/v1/batches", "/v1/batches/{id}"
    file_id, batch_id = ("FileId",), ("BatchId",)
    pages, all_files = ("FilesLimit", "After", "Order", "Purpose"), "The files of the API key"
    all_batches, create = "The batches of the API key", (*AT_ONCE, 429)
    return (
        Endpoint(f"POST {files}", tag, "Upload a file", "File", AT_ONCE, form="FileUpload"),
        Endpoint(f"GET {files}", tag, all_files, "FileList", LOOKED_UP, "", pages),
        Endpoint(f"GET {file}", tag, "One file", "File", LOOKED_UP, "", file_id),
        Endpoint(f"GET {file}/content", tag, "The content of a file", {BYTES: ""}, LOOKED_UP, "", file_id),
        Endpoint(f"DELETE {file}", tag, "Delete a file", "FileDeletion", (*LOOKED_UP, 409), "", file_id),
        Endpoint(f"POST {batches}", tag, "Run the calls of a file", "Batch", create, "BatchRequest"),
        Endpoint(f"GET {batches}", tag, all_batches, "BatchList", LOOKED_UP, "", ("BatchesLimit", "After")),
        Endpoint(f"GET {batch}", tag, "A batch as it is now", "Batch", LOOKED_UP, "", batch_id),
        Endpoint(f"POST {batch}/cancel", tag, "Stop a batch", "Batch", LOOKED_UP, "", batch_id),
    )


# The errors and headers of the Messages API, and the parameters of its calls.
_OF_MESSAGES: dict[str, Any] = {
    "error": "MessageError",
    "headers": ("AnswerId",),
    "parameters": VERSIONS,
}
_CHAT, _COMPLETIONS = ("ChatCompletion", "ChatCompletionChunk"), ("Completion", "CompletionChunk")
_AS_AT_ANTHROPIC = "as in Anthropic's Messages API"
_OFF = (404,)

ENDPOINTS: tuple[Endpoint, ...] = (
    # Each dialect is one entry.
    *_dialect("/v1/chat/completions", *_CHAT, "Answer a conversation", "ChatId"),
    *_dialect("/v1/completions", *_COMPLETIONS, "Continue one prompt, or several", "CompletionId"),
    _fork("/v1/chat/completions", *_CHAT, "ChatId"),
    _fork("/v1/completions", *_COMPLETIONS, "CompletionId"),
    *_dialect(
        "/v1/messages",
        "Message",
        "MessageEvent",
        f"Answer a conversation, {_AS_AT_ANTHROPIC}",
        "MessageId",
        **_OF_MESSAGES,
    ),
    Endpoint(
        "POST /v1/messages/count_tokens",
        "tokens",
        f"The number of tokens of a conversation, {_AS_AT_ANTHROPIC}",
        "MessageCount",
        AT_ONCE,
        "MessageCountRequest",
        **_OF_MESSAGES,
    ),
    *_responses(),
    *_conversations(),
    Endpoint("POST /v1/embeddings", "embeddings", "Embed texts", "EmbeddingList", CALL, "EmbeddingRequest", NEW),
    *(
        Endpoint(
            f"POST {path}", "embeddings", f"Rank documents by a query, {form}", "RerankList", CALL, "RerankRequest", NEW
        )
        for path, form in (
            ("/v1/rerank", "as at Cohere, Jina and vLLM"),
            ("/v2/rerank", "as at Cohere"),
            ("/rerank", "as at vLLM"),
        )
    ),
    *(
        Endpoint(
            f"POST {path}", "embeddings", "Score pairs of texts, as at vLLM", "ScoreList", CALL, "ScoreRequest", NEW
        )
        for path in ("/v1/score", "/score")
    ),
    *_files_and_batches(),
    Endpoint(
        "POST /tokenize",
        "tokens",
        "The tokens of a text or of a conversation",
        "Tokens",
        AT_ONCE,
        "TokenizeRequest",
    ),
    Endpoint("POST /detokenize", "tokens", "The text of tokens", "Detokenized", AT_ONCE, "DetokenizeRequest"),
    Endpoint(
        "GET /tokenizer_info",
        "tokens",
        "The configuration of the tokenizer, if the server shows it",
        "TokenizerInfo",
        MODEL,
        parameters=("Model",),
    ),
    Endpoint("GET /v1/models", "models", "The model of this gateway, with its limits and capabilities", "ModelList"),
    Endpoint("GET /v1/models/{name}", "models", "One model", "Model", MODEL, parameters=("ModelName",)),
    Endpoint(
        "GET /v1/usage",
        "models",
        "Requests and tokens of the API key by day and model",
        "UsageList",
        (503,),
        parameters=("Days", "UsageFormat"),
    ),
    Endpoint("GET /version", "server", "The version of Quire", "Version"),
    Endpoint("GET /healthz", "server", "Liveness: 200 while the process answers", "Liveness"),
    Endpoint("GET /health", "server", "Another name of /healthz", "Liveness"),
    Endpoint("GET /ping", "server", "Another name of /healthz", "Liveness"),
    Endpoint(
        "GET /readyz", "server", "Readiness: whether a new request would be served", "Readiness", not_ready="Readiness"
    ),
    Endpoint("GET /status", "server", "Whether work makes progress now", "Status"),
    Endpoint("GET /openapi.json", "server", "This document", ""),
    Endpoint("GET /docs", "pages", "This document as a page", {HTML: ""}),
    Endpoint("GET /", "pages", "The chat page", {HTML: ""}),
    Endpoint("GET /engine", "pages", "The engine page", {HTML: ""}, _OFF),
    Endpoint(
        "GET /engine/workers",
        "pages",
        "The workers that the engine page can show",
        "EngineWorkers",
        _OFF,
        parameters=("Model",),
    ),
    Endpoint(
        "GET /engine/stream",
        "pages",
        "Views of the workers",
        {EVENTS: ""},
        (404, 429),
        parameters=("Model",),
    ),
)

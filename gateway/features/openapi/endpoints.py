"""The endpoints of the gateway: what each takes, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.gateway.api.embeddings import EMBEDDINGS
from quire.gateway.api.messages import parameters as messages
from quire.gateway.api.parameters import CHAT, COMPLETIONS, UNSUPPORTED
from quire.gateway.api.responses.parameters import REFUSED as REFUSED_RESPONSES
from quire.gateway.api.responses.parameters import RESPONSES
from quire.gateway.features.batches.batch_parameters import BATCHES
from quire.gateway.features.tokenization.token_requests import DETOKENIZE, TOKENIZE
from quire.shared.protocol.sampling_params import Parameter

JSON, EVENTS, HTML = "application/json", "text/event-stream", "text/html"
FORM, BYTES = "multipart/form-data", "application/octet-stream"

# Statuses of errors that every endpoint may answer with, those of a body, and those of a call that needs Redis.
EVERY = (400, 401, 417, 431, 500)
BODY = (408, 413, 415, 503)
MODEL = (404,)
CALL = (402, 403, *BODY, *MODEL, 409, 429, 499, 504)
STORED = (404, 499, 503, 504)
FILES = (404, 503)
_VERSIONS = ("AnthropicVersion", "AnthropicBeta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path.

    answers: the schema of an answer by its type. request: the schema of the body, whose parameters are `table`; empty
    without a body. form: the schema of a body that is a form.
    unsupported: parameters that are not honoured, each with the values that ask for nothing. errors:
    statuses besides EVERY. error: the schema of errors. parameters: names of the document's parameters. headers: names
    of the document's headers that answers have besides the ids. not_ready: the schema of an answer with the status 503
    that is not an error.
    """

    method: str
    path: str
    tag: str
    summary: str
    answers: Mapping[str, str]
    request: str = ""
    form: str = ""
    table: Mapping[str, Parameter] = field(default_factory=dict)
    unsupported: Mapping[str, tuple[Any, ...]] = field(default_factory=UNSUPPORTED.copy)
    error: str = "Error"
    headers: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    not_ready: str = ""


def _dialect(
    path: str,
    name: str,
    event: str,
    summary: str,
    table: Mapping[str, Parameter],
    call_id: str,
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
    parameters: tuple[str, ...] = (),
    **form: Any,
) -> tuple[Endpoint, ...]:
    """The endpoints of a dialect: it creates calls, resumes their streams, cancels and parks them.

    path: of new calls. name: of the schema of answers, and with `Request` of bodies. event: the schema of events.
    call_id: the document's parameter that is the id of a call. parameters: of new calls. form: `error` and `headers` of
    all endpoints.
    """
    return (
        Endpoint(
            method="post",
            path=path,
            tag="generation",
            summary=summary,
            request=f"{name}Request",
            table=table,
            unsupported=unsupported,
            answers={JSON: name, EVENTS: event},
            errors=CALL,
            parameters=(*parameters, "IdempotencyKey", "RequestTimeout", "Traceparent"),
            **form,
        ),
        Endpoint(
            method="get",
            path=f"{path}/{{id}}/stream",
            tag="generation",
            summary="Resume a stream at any event",
            answers={EVENTS: event},
            errors=STORED,
            parameters=(call_id, "StartingAfter", "LastEventId"),
            **form,
        ),
        Endpoint(
            method="post",
            path=f"{path}/{{id}}/cancel",
            tag="generation",
            summary="Cancel a running call",
            answers={JSON: "Cancellation"},
            errors=(404, 503),
            parameters=(call_id,),
            **form,
        ),
        *_parking(path, call_id, **form),
    )


def _parking(path: str, call_id: str, **form: Any) -> tuple[Endpoint, ...]:
    """The endpoints that park a call and let it continue. The arguments are those of `_dialect`."""
    park = Endpoint(
        method="post",
        path=f"{path}/{{id}}/park",
        tag="generation",
        summary="Park a call: it waits with its tokens",
        answers={JSON: "Parking"},
        errors=(404, 429, 503),
        parameters=(call_id,),
        **form,
    )
    unpark = replace(
        park,
        path=f"{path}/{{id}}/unpark",
        summary="Let a parked call continue at its next token",
        errors=(402, 404, 429, 503),
    )
    return park, unpark


def _get(
    path: str, tag: str, summary: str, kind: str, schema: str, **more: tuple[int, ...] | tuple[str, ...] | str
) -> Endpoint:
    return Endpoint(method="get", path=path, tag=tag, summary=summary, answers={kind: schema}, **more)  # type: ignore[arg-type]


def _responses() -> tuple[Endpoint, ...]:
    """The endpoints of the Responses API."""
    one = "/v1/responses/{id}"
    refused: dict[str, tuple[Any, ...]] = dict.fromkeys(REFUSED_RESPONSES, ())
    create = Endpoint(
        method="post",
        path="/v1/responses",
        tag="generation",
        summary="Create a response",
        request="ResponseRequest",
        table=RESPONSES,
        unsupported=refused,
        answers={JSON: "Response", EVENTS: "ResponseEvent"},
        errors=CALL,
        parameters=("IdempotencyKey", "RequestTimeout", "Traceparent"),
    )
    count = Endpoint(
        method="post",
        path="/v1/responses/input_tokens",
        tag="tokens",
        summary="The number of tokens of the prompt of a response",
        request="ResponseRequest",
        table=RESPONSES,
        unsupported=refused,
        answers={JSON: "ResponseTokens"},
        errors=(*BODY, *MODEL),
    )
    read = Endpoint(
        method="get",
        path=one,
        tag="generation",
        summary="A stored response, or its events",
        answers={JSON: "Response", EVENTS: "ResponseEvent"},
        errors=STORED,
        parameters=("ResponseId", "Stream", "StartingAfterNumber", "LastNumber"),
    )
    cancel = Endpoint(
        method="post",
        path=f"{one}/cancel",
        tag="generation",
        summary="Cancel a response in the background",
        answers={JSON: "Response"},
        errors=(404, 503),
        parameters=("ResponseId",),
    )
    delete = replace(cancel, method="delete", path=one, summary="Delete a response", answers={JSON: "ResponseDeletion"})
    items = replace(
        cancel,
        method="get",
        path=f"{one}/input_items",
        summary="The items before the answer",
        answers={JSON: "ResponseItems"},
        parameters=("ResponseId", "Limit", "Order", "After"),
    )
    return create, count, read, cancel, delete, items, *_parking("/v1/responses", "ResponseId")


def _files() -> tuple[Endpoint, ...]:
    """The endpoints of files."""
    path, one = "/v1/files", "/v1/files/{id}"
    show = _get(one, "batches", "One file", JSON, "File", errors=FILES, parameters=("FileId",))
    return (
        Endpoint(
            method="post",
            path=path,
            tag="batches",
            summary="Upload a file",
            form="FileUpload",
            answers={JSON: "File"},
            errors=(*BODY, 404),
        ),
        replace(
            show,
            path=path,
            summary="The files of the API key",
            answers={JSON: "FileList"},
            parameters=("FileLimit", "After", "Order", "Purpose"),
        ),
        show,
        replace(show, path=f"{one}/content", summary="The content of a file", answers={BYTES: ""}),
        replace(
            show,
            method="delete",
            summary="Delete a file",
            answers={JSON: "FileDeletion"},
            errors=(*FILES, 409),
        ),
    )


def _batches() -> tuple[Endpoint, ...]:
    """The endpoints of batches."""
    path, one = "/v1/batches", "/v1/batches/{id}"
    show = _get(one, "batches", "A batch as it is now", JSON, "Batch", errors=FILES, parameters=("BatchId",))
    return (
        Endpoint(
            method="post",
            path=path,
            tag="batches",
            summary="Run the calls of a file",
            request="BatchRequest",
            table=BATCHES,
            unsupported={},
            answers={JSON: "Batch"},
            errors=(*BODY, 404, 429),
        ),
        replace(
            show,
            path=path,
            summary="The batches of the API key",
            answers={JSON: "BatchList"},
            parameters=("Limit", "After"),
        ),
        show,
        replace(show, method="post", path=f"{one}/cancel", summary="Stop a batch"),
    )


# The errors and headers of the Messages API.
_OF_MESSAGES: dict[str, Any] = {"error": "MessageError", "headers": ("AnswerId",)}

ENDPOINTS: tuple[Endpoint, ...] = (
    # Each dialect is one entry.
    *_dialect("/v1/chat/completions", "ChatCompletion", "ChatCompletionChunk", "Answer a conversation", CHAT, "ChatId"),
    *_dialect(
        "/v1/completions",
        "Completion",
        "CompletionChunk",
        "Continue one prompt, or several",
        COMPLETIONS,
        "CompletionId",
    ),
    *_dialect(
        "/v1/messages",
        "Message",
        "MessageEvent",
        "Answer a conversation, as in Anthropic's Messages API",
        messages.CREATE | messages.WITHOUT_EFFECT,
        "MessageId",
        unsupported=messages.REFUSED,
        parameters=_VERSIONS,
        **_OF_MESSAGES,
    ),
    Endpoint(
        method="post",
        path="/v1/messages/count_tokens",
        tag="tokens",
        summary="The number of tokens of a conversation, as in Anthropic's Messages API",
        request="MessageCountRequest",
        table=messages.COUNT_TOKENS | messages.WITHOUT_EFFECT,
        unsupported=messages.REFUSED,
        answers={JSON: "MessageCount"},
        errors=(*BODY, *MODEL),
        parameters=_VERSIONS,
        **_OF_MESSAGES,
    ),
    *_responses(),
    Endpoint(
        method="post",
        path="/v1/embeddings",
        tag="embeddings",
        summary="Embed texts",
        request="EmbeddingRequest",
        table=EMBEDDINGS,
        unsupported={},
        answers={JSON: "EmbeddingList"},
        errors=CALL,
        parameters=("IdempotencyKey", "RequestTimeout", "Traceparent"),
    ),
    *_files(),
    *_batches(),
    Endpoint(
        method="post",
        path="/tokenize",
        tag="tokens",
        summary="The tokens of a text or of a conversation",
        request="TokenizeRequest",
        table=TOKENIZE,
        answers={JSON: "Tokens"},
        errors=(*BODY, *MODEL),
    ),
    Endpoint(
        method="post",
        path="/detokenize",
        tag="tokens",
        summary="The text of tokens",
        request="DetokenizeRequest",
        table=DETOKENIZE,
        answers={JSON: "Detokenized"},
        errors=(*BODY, *MODEL),
    ),
    _get(
        "/tokenizer_info",
        "tokens",
        "The configuration of the tokenizer, if the server shows it",
        JSON,
        "TokenizerInfo",
        errors=(400, 404),
        parameters=("Model",),
    ),
    _get("/v1/models", "models", "The model of this gateway, with its limits and capabilities", JSON, "ModelList"),
    _get("/v1/models/{name}", "models", "One model", JSON, "Model", errors=MODEL, parameters=("ModelName",)),
    _get(
        "/v1/usage",
        "models",
        "Requests and tokens of the API key by day and model",
        JSON,
        "UsageList",
        errors=(503,),
        parameters=("Days", "UsageFormat"),
    ),
    _get("/version", "server", "The version of Quire", JSON, "Version"),
    _get("/healthz", "server", "Liveness: 200 while the process answers", JSON, "Liveness"),
    _get("/health", "server", "Another name of /healthz", JSON, "Liveness"),
    _get("/ping", "server", "Another name of /healthz", JSON, "Liveness"),
    _get(
        "/readyz",
        "server",
        "Readiness: whether a new request would be served",
        JSON,
        "Readiness",
        not_ready="Readiness",
    ),
    _get("/status", "server", "Whether work makes progress now", JSON, "Status"),
    _get("/openapi.json", "server", "This document", JSON, ""),
    _get("/docs", "pages", "This document as a page", HTML, ""),
    _get("/", "pages", "The chat page", HTML, ""),
    _get("/engine", "pages", "The engine page", HTML, "", errors=(404,)),
    _get(
        "/engine/workers",
        "pages",
        "The workers that the engine page can show",
        JSON,
        "EngineWorkers",
        errors=(404,),
        parameters=("Model",),
    ),
    _get(
        "/engine/stream",
        "pages",
        "Views of a worker",
        EVENTS,
        "",
        errors=(404, 429),
        parameters=("Model", "Worker", "Follow"),
    ),
)

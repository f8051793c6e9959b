"""The parameters of POST /v1/batches, and the JSON schemas of files and batches in answers."""

from __future__ import annotations

import re
from typing import Any

from quire.gateway.api.labels import LABELS
from quire.gateway.api.paging import AFTER, LIMIT, ORDER, ListQuery
from quire.gateway.api.parameters import Body
from quire.gateway.features.batches.batch import PREFIX, BatchStatus
from quire.gateway.features.batches.files.file_store import PREFIX as FILE_PREFIX
from quire.gateway.features.batches.files.file_store import PURPOSES, UPLOADED
from quire.shared.config.schema_parts import (
    COUNT,
    FLAG,
    TEXT,
    Schema,
    any_of,
    array,
    closed,
    id_parameter,
    or_null,
    record,
    ref,
    request_parameter,
)
from quire.shared.config.validators import Integer, InvalidValue, OneOf, Text, wrong
from quire.shared.protocol.sampling_params import Parameter

_PURPOSE = OneOf(PURPOSES)
FILES_QUERY = ListQuery(100, 1000, (LIMIT, AFTER, "purpose", ORDER))
BATCHES_QUERY = ListQuery(20, 100)
# The parameters of requests besides bodies, by their names in /openapi.json.
PARAMETERS: Schema = {
    "FileId": id_parameter(FILE_PREFIX),
    "FilesLimit": FILES_QUERY.limit_parameter,
    "Purpose": request_parameter("query", "purpose", _PURPOSE, "only files of this purpose"),
    "BatchId": id_parameter(PREFIX),
    "BatchesLimit": BATCHES_QUERY.limit_parameter,
}
# The endpoints whose calls a batch may have.
BATCH_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
)
# Longest completion window. Lines are kept in Redis for a day more.
MAX_WINDOW_S = 14 * 86_400
# Bounds of the seconds until a file is deleted (OpenAI API reference).
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
MAX_FILE_ID = 128
# The fields of an upload that say when a file is deleted.
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_EXPIRY = Integer(MIN_EXPIRY_S, MAX_EXPIRY_S)

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"[1-9][0-9]{0,4}[mhd]", re.ASCII)


def completion_window(name: str, value: Any) -> str:
    """Return a completion window. Raises InvalidValue."""
    if type(value) is not str or not _WINDOW.fullmatch(value) or window_s(value) > MAX_WINDOW_S:
        raise wrong(name, "minutes, hours or days up to 14d, such as 24h", value)
    return value


def window_s(window: str) -> int:
    """Return the seconds of a completion window."""
    return int(window[:-1]) * _UNITS[window[-1]]


def expires_after(name: str, value: Any) -> int:
    """Return the seconds of `expires_after`. Raises InvalidValue."""
    if type(value) is not dict or value.keys() != {"anchor", "seconds"} or value["anchor"] != "created_at":
        raise InvalidValue(name, "must be an object with the anchor created_at and seconds")
    return expiry_s(f"{name}.seconds", value["seconds"])


def expiry_s(name: str, value: Any) -> int:
    """Return the seconds after which a file is deleted. Raises InvalidValue."""
    return _EXPIRY(name, value)


BATCHES: dict[str, Parameter] = {
    "input_file_id": Parameter(
        read=Text(1, MAX_FILE_ID), required=True, help="an uploaded file of the purpose `batch`"
    ),
    "endpoint": Parameter(
        read=OneOf(BATCH_ENDPOINTS),
        required=True,
        help="the `url` of every line",
    ),
    "completion_window": Parameter(
        read=completion_window,
        required=True,
        kind="number with `m`, `h` or `d`, at most `14d`",
        schema=_WINDOW,
        help="minutes, hours or days until the batch expires, such as `24h`, the one value of OpenAI's API",
    ),
    "metadata": Parameter(read=LABELS["metadata"].read, default=(), help="stored with the batch, and returned with it"),
    "output_expires_after": Parameter(
        read=expires_after,
        kind="object with `anchor` and `seconds`",
        schema=closed(
            {
                "anchor": {"const": "created_at"},
                "seconds": _EXPIRY,
            }
        ),
        help=f"seconds from the end of the batch until its files are deleted, from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}; "
        "by default `--file-retention-s`. The anchor is `created_at`",
    ),
}
# By the name of the body's schema in /openapi.json.
BODIES = {"BatchRequest": Body(BATCHES, {})}

_TIME = or_null(COUNT)
_ERROR = record(code=or_null(TEXT), message=TEXT, param=or_null(TEXT), line=or_null(COUNT))


def _list(name: str) -> Schema:
    return record(
        object={"const": "list"},
        data=array(ref(name)),
        first_id=or_null(TEXT),
        last_id=or_null(TEXT),
        has_more=FLAG,
    )


# With the form of an upload.
BATCH_SCHEMAS: Schema = {
    "FileUpload": record(
        {
            ANCHOR: {"const": "created_at"},
            SECONDS: any_of(_EXPIRY, TEXT),
        },
        purpose=OneOf(UPLOADED),
        file=TEXT,
    ),
    "File": record(
        id=TEXT,
        object={"const": "file"},
        bytes=COUNT,
        created_at=COUNT,
        expires_at=_TIME,
        filename=TEXT,
        purpose=_PURPOSE,
        status={"const": "processed"},
        status_details={"type": "null"},
    ),
    "FileList": _list("File"),
    "FileDeletion": record(id=TEXT, object={"const": "file"}, deleted={"const": True}),
    "Batch": record(
        id=TEXT,
        object={"const": "batch"},
        endpoint=TEXT,
        model=or_null(TEXT),
        errors=or_null(record(object={"const": "list"}, data=array(_ERROR))),
        input_file_id=TEXT,
        completion_window=TEXT,
        status=OneOf(tuple(BatchStatus)),
        output_file_id=or_null(TEXT),
        error_file_id=or_null(TEXT),
        created_at=COUNT,
        in_progress_at=_TIME,
        expires_at=COUNT,
        finalizing_at=_TIME,
        completed_at=_TIME,
        failed_at=_TIME,
        expired_at=_TIME,
        cancelling_at=_TIME,
        cancelled_at=_TIME,
        request_counts=record(total=COUNT, completed=COUNT, failed=COUNT),
        usage=record(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
        metadata=or_null({"type": "object", "additionalProperties": TEXT}),
    ),
    "BatchList": _list("Batch"),
}

"""The parameters of POST /v1/batches, and the JSON schemas of files and batches in answers."""

from __future__ import annotations

import re
from typing import Any

from quire.gateway.api.labels import LABELS
from quire.gateway.api.schema_parts import COUNT, FLAG, TEXT, Schema, any_of, array, closed, or_null, record, ref
from quire.shared.config.validators import InvalidValue, OneOf, Text, shown, wrong
from quire.shared.protocol.sampling_params import Parameter

# The endpoints whose calls a batch may have.
BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
# Longest completion window. Lines are kept in Redis for a day more.
MAX_WINDOW_S = 14 * 86_400
# Bounds of the seconds until a file is deleted (OpenAI API reference).
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
MAX_FILE_ID = 128

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])", re.ASCII)


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
    if type(value) is not int or not MIN_EXPIRY_S <= value <= MAX_EXPIRY_S:
        raise InvalidValue(name, f"must be an integer from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}, not {shown(value)}")
    return value


BATCHES: dict[str, Parameter] = {
    "input_file_id": Parameter(
        read=Text(1, MAX_FILE_ID), required=True, help="an uploaded file of the purpose `batch`"
    ),
    "endpoint": Parameter(
        read=OneOf(BATCH_ENDPOINTS),
        required=True,
        kind=", ".join(f"`{path}`" for path in BATCH_ENDPOINTS[:-1]) + f" or `{BATCH_ENDPOINTS[-1]}`",
        help="the `url` of every line",
    ),
    "completion_window": Parameter(
        read=completion_window,
        required=True,
        kind="number with `m`, `h` or `d`, at most `14d`",
        schema={"type": "string", "pattern": "^[1-9][0-9]{0,4}[mhd]$"},
        help="minutes, hours or days until the batch expires, such as `24h`",
    ),
    "metadata": Parameter(read=LABELS["metadata"].read, default=(), help="stored with the batch, and returned with it"),
    "output_expires_after": Parameter(
        read=expires_after,
        kind="object with `anchor` and `seconds`",
        schema=closed(
            {
                "anchor": {"const": "created_at"},
                "seconds": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
            }
        ),
        help="seconds from the end of the batch until its files are deleted, from 3600 to 2592000; by default "
        "`--file-retention-s`. The anchor is `created_at`",
    ),
}

_STATUSES = ("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled")
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
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": any_of(COUNT, TEXT),
        },
        purpose={"const": "batch"},
        file=TEXT | {"contentMediaType": "application/jsonl"},
    ),
    "File": record(
        id=TEXT,
        object={"const": "file"},
        bytes=COUNT,
        created_at=COUNT,
        expires_at=_TIME,
        filename=TEXT,
        purpose={"enum": ["batch", "batch_output"]},
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
        status={"enum": list(_STATUSES)},
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

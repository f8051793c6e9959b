"""JSON schemas of files and batches in answers, and of the form of an upload."""

from __future__ import annotations

from quire.gateway.api.schema_parts import COUNT, FLAG, TEXT, Schema, any_of, array, or_null, record, ref

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

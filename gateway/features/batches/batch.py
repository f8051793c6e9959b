"""The record of a batch, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quire.gateway.features.batches.files.file_store import PREFIX as FILE_PREFIX

PREFIX = "batch_"


class BatchStatus(StrEnum):
    """The status of a batch, as in the OpenAI API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


# A batch with such a status has lines to run or to end.
OPEN = frozenset((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING))
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_NUMBERS = (
    *("created", "expires", "total", "completed", "failed", "expired_lines", "prompt_tokens", "completion_tokens"),
    *("output_bytes", "error_bytes"),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as Redis has it. input, output, errors_file: ids of files; those of the last two exist after its end.

    numbers: counts and times. running: completed and failed lines of windows that are not counted yet.
    """

    id: str
    owner: str
    status: str
    endpoint: str
    lane: str
    model: str
    input: str
    output: str
    errors_file: str
    window: str
    has_output: bool
    has_errors: bool
    numbers: Mapping[str, int]
    times: Mapping[str, int]
    metadata: Mapping[str, str] | None
    errors: tuple[Mapping[str, Any], ...]
    running: tuple[int, int] = (0, 0)

    @classmethod
    def read(cls, batch_id: str, fields: Mapping[str, str], running: tuple[int, int] = (0, 0)) -> Batch:
        """Return the batch of a hash in Redis."""
        return cls(
            id=batch_id,
            owner=fields.get("owner", ""),
            status=fields.get("status", ""),
            endpoint=fields.get("endpoint", ""),
            lane=fields.get("lane", ""),
            model=fields.get("model", ""),
            input=fields.get("input", ""),
            output=fields.get("output", ""),
            errors_file=fields.get("errors_file", ""),
            window=fields.get("window", ""),
            has_output=bool(fields.get("has_output")),
            has_errors=bool(fields.get("has_errors")),
            numbers={name: int(fields.get(name) or 0) for name in _NUMBERS},
            times={name: int(fields[at]) for name in _TIMES if (at := f"{name}_at") in fields},
            metadata=json.loads(fields["metadata"]) if fields.get("metadata") else None,
            errors=tuple(json.loads(fields["errors"])) if fields.get("errors") else (),
            running=running,
        )

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    def shown(self) -> dict[str, Any]:
        """Return the Batch object of the API."""
        numbers = self.numbers
        prompt_tokens, completion_tokens = numbers["prompt_tokens"], numbers["completion_tokens"]
        return {
            "id": PREFIX + self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": FILE_PREFIX + self.input,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": FILE_PREFIX + self.output if self.has_output else None,
            "error_file_id": FILE_PREFIX + self.errors_file if self.has_errors else None,
            "created_at": numbers["created"],
            "in_progress_at": self.times.get("in_progress"),
            "expires_at": numbers["expires"],
            "finalizing_at": self.times.get("finalizing"),
            "completed_at": self.times.get("completed"),
            "failed_at": self.times.get("failed"),
            "expired_at": self.times.get("expired"),
            "cancelling_at": self.times.get("cancelling"),
            "cancelled_at": self.times.get("cancelled"),
            "request_counts": {
                "total": numbers["total"],
                "completed": numbers["completed"] + self.running[0],
                "failed": numbers["failed"] + self.running[1],
            },
            "usage": {
                "input_tokens": prompt_tokens,
                "output_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
            "metadata": self.metadata,
        }

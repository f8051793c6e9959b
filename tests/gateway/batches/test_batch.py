"""The Batch object from the fields in Redis."""

from __future__ import annotations

from quire.gateway.batches.batch import Batch, BatchStatus


def test_a_new_batch() -> None:
    batch = Batch.read("0" * 32, {"status": "validating", "endpoint": "/v1/completions", "input": "1" * 32})
    shown = batch.shown()
    assert (shown["id"], shown["input_file_id"]) == ("batch_" + "0" * 32, "file-" + "1" * 32)
    assert (shown["errors"], shown["output_file_id"], shown["metadata"], shown["model"]) == (None, None, None, None)
    assert shown["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch.is_open


def test_counts_include_windows_that_run() -> None:
    fields = {"status": "in_progress", "total": "20", "completed": "10", "failed": "1", "in_progress_at": "5"}
    shown = Batch.read("0" * 32, fields, (3, 2)).shown()
    assert shown["request_counts"] == {"total": 20, "completed": 13, "failed": 3}
    assert (shown["in_progress_at"], shown["completed_at"]) == (5, None)


def test_files_are_named_once_they_exist() -> None:
    fields = {"status": "completed", "output": "a" * 32, "errors_file": "b" * 32, "has_output": "1", "has_errors": ""}
    batch = Batch.read("0" * 32, fields)
    assert (batch.shown()["output_file_id"], batch.shown()["error_file_id"]) == ("file-" + "a" * 32, None)
    assert not batch.is_open


def test_a_failed_batch_has_its_errors() -> None:
    shown = Batch.read("0" * 32, {"status": "failed", "errors": '[{"line": 1}]'}).shown()
    assert shown["errors"] == {"object": "list", "data": [{"line": 1}]}
    assert set(BatchStatus) >= {shown["status"]}

"""Files that clients upload and that batches write: storage, records in Redis, and the endpoints below /v1/files."""

"""The admin endpoints of a gateway: `server` serves `/metrics` and `/health`, `metrics` renders the metrics."""

"""Spans of HTTP requests for OpenTelemetry."""

"""The counts of HTTP requests and calls."""

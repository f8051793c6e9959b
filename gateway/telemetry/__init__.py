"""Records of each HTTP request: its counts (`request_meter`), its span (`tracing`), its log line (`access_log`)."""

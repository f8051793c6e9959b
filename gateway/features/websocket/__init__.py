"""The Responses API over WebSockets."""

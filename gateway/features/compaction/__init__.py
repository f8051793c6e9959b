"""Compaction: the model itself writes a summary that takes the place of a conversation. Door: `compact_calls`."""

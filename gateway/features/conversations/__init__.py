"""Conversations of the API: items that responses continue one after the other. Doors: `conversation_calls`, `sweep`."""

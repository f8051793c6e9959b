"""OpenAI's Responses API: its bodies, its conversations of items, its typed events, and stored responses."""

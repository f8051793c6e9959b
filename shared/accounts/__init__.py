"""API keys, their projects and organisations, and the limits of each, as Redis stores them."""

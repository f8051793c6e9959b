"""API keys: who calls, what a key may use, the limits of its calls, and the commands and endpoints that change keys."""

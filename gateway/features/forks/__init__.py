"""Forks: new calls that share the prompt and the first tokens of the answer of another call."""

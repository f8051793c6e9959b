"""Prefix affinity: requests are left for a moment to the workers that hold prefixes of their prompts."""

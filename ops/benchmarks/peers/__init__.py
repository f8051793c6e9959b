"""Comparison with other servers on one machine: each case in alternating rounds, with the same client and prompts."""

"""Speculation that changes no token: a step computes drafted tokens too, and keeps those that the model chooses."""

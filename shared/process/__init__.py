"""Processes: starting, ending, waiting."""

"""Recurrent states: slots for them, and prefixes that end at a snapshot."""

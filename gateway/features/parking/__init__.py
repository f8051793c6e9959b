"""Parked calls: set aside with their tokens, and queued again at the same token."""

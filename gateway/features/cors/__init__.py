"""Answers to pages of other origins."""

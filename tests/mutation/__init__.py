"""Measures the strength of the tests: breaks the code at one place and sees whether a test fails."""

"""Measures the strength of the tests: breaks one place of the code at a time and counts the mutants that tests notice."""

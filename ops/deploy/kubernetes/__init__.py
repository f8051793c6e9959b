"""Quire on Kubernetes: a Helm chart, what makes its schema, and what gets helm for its tests."""

"""Scores of pairs of texts: documents ranked by a query, and pairs as they are."""

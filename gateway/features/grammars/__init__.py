"""Grammars that answers must follow: the parameters that give them, and the checks that answers can."""

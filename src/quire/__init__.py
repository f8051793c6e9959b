"""Quire serves large language models: a gateway and workers, with Redis between them.

The packages are links to the folders at the top of the project; a wheel holds the folders themselves.
"""

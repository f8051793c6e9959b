"""Decode steps of a few sequences: about seven kernels per layer, each of which starts while the one before it ends.

With one to MOST_ROWS tokens a step reads every weight once, and a launch costs as much as reading a small layer. So
norms are computed within the products that need them, and sums within the products that feed them. `layers` is the
door; `products` has the kernels; `dependent_launch` has the two instructions of programmatic dependent launch.
"""

"""Checkpoints whose weights are quantised: one module per format, and the reader that packs them for the kernels."""

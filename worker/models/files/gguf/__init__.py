"""GGUF files: types of blocks, names of tensors, and the weights that the decoder reads."""

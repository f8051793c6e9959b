"""Models: a checkpoint becomes a Decoder that runs batches of tokens over a paged KV cache."""

"""Models that workers register in Redis: a gateway without a model folder finds, loads and serves them."""

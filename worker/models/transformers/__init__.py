"""The bridge to models that Transformers computes. `bridge` is its only door."""

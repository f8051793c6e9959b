"""Tokens of a model without a worker: /tokenize, /detokenize and /tokenizer_info."""

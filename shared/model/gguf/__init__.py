"""Reads GGUF files, the format of llama.cpp: metadata, tokenizer and the places of tensors. Knows no tensor library."""

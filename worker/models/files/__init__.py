"""Reads checkpoints: safetensors, quantised weights, GGUF files and LoRA adapters."""

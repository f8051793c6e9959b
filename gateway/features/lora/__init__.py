"""LoRA adapters at a gateway."""

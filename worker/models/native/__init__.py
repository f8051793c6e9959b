"""Quire's own decoder: Llama-shaped families, mixtures of experts, and Gemma."""

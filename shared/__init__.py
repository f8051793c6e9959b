"""What gateway and worker both speak: messages, keys, scripts, settings, text. No torch, and nothing of the project."""

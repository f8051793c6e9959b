"""Images of prompts: the pixels of their files."""

"""What gateway and worker tell each other through Redis: keys, states, messages, the operations and their scripts."""

"""Tool calls and reasoning: how models write them, how their text becomes parts, and the grammars of such answers."""

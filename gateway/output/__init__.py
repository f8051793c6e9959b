"""The output of a model in parts: answer, reasoning and tool calls, read from its text token by token."""

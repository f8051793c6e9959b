"""The load generator `quire bench`: any server that speaks the OpenAI API, one or two at a time."""

"""The load generator `quire bench`: measures one or two servers that have the OpenAI API."""

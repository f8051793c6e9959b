"""The part of a vision-language model that turns images into embeddings of tokens. The door is `tower`."""

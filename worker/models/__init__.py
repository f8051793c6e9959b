"""The models that a worker serves: its own decoder, the bridge to Transformers, and the files of both."""

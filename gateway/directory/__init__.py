"""The models of a gateway process: which there are (`model_directory`), and which one a request means (`dispatch`)."""

"""Shared by gateway and worker: messages, keys, scripts, settings, text. Imports neither torch nor the services."""

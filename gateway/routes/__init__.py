"""The routes of the APIs, each with the handlers that only it has."""

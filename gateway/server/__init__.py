"""The server of a gateway: its commands, start and end (`main`), the HTTP server, and the application (`app`)."""

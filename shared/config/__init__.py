"""Settings of the processes, the command line, and checks of values."""

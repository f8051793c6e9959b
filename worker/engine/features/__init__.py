"""Features of a request: the engine calls each through its one module."""

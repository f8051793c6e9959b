"""What keeps a worker from starting."""


class WorkerStartError(RuntimeError):
    """The worker cannot start: one line for people, with the remedy."""

"""The error of a GGUF file: one line with the place, the fault and a remedy."""

from __future__ import annotations

from quire.shared.process.errors import StartError

AGAIN = "download the file again"


class GGUFError(StartError):
    """A GGUF file cannot be served. The parts are kept, so that callers can raise an error of their own with them."""

    def __init__(self, where: object, what: str, remedy: str = AGAIN) -> None:
        super().__init__(" ".join(f"{where}: {what}; {remedy}".split()))
        self.where, self.what, self.remedy = where, what, remedy

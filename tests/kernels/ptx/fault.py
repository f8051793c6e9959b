"""The error of the emulator."""


class PtxFault(Exception):
    """An error of the program, or an access that is undefined on a GPU. The message names the instruction."""

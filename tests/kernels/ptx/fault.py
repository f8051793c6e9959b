"""The error of the emulator."""


class PtxFault(Exception):
    """The program does what is wrong or undefined on a GPU. The message names the instruction."""

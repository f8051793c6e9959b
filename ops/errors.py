"""What a command tells its user when it cannot go on."""


class CommandError(Exception):
    """One line that says what is wrong, where, and the remedy. The command prints it and exits with `exit_code`."""

    exit_code = 1

"""How a verb says that it cannot go on."""


class CommandError(Exception):
    """The work failed; printed in one line, exit code 1."""

    exit_code = 1


class UsageError(CommandError):
    """The command or its input is wrong; printed in one line, exit code 2."""

    exit_code = 2

"""What can go wrong when running things on this machine."""


class LocalError(Exception):
    """Base of this package's errors: the message says what failed and what to do about it."""


class MissingPartError(LocalError):
    """A binary from a wheel is not installed."""


class NotReadyError(LocalError):
    """A process ended or stayed silent before it answered."""


class PortInUseError(LocalError):
    """A port that was asked for by number is taken."""


class DataDirError(LocalError):
    """The state directory is in use, unreadable or from another version."""

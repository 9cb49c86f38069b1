"""What can be wrong with a replay; one base, and the text is the message."""


class ReplayError(Exception):
    """A replay cannot start or cannot go on; the text says why and what to change."""


class TraceError(ReplayError):
    """A trace file is not in the trace format; names the file and the line."""

    def __init__(self, source: str, line: int | None, what: str) -> None:
        where = source if line is None else f"{source}:{line}"
        super().__init__(f"{where}: {what}")
        self.source = source
        self.line = line
        self.what = what


class WorkloadError(ReplayError):
    """The generated workload was asked for something impossible."""


class ReportError(ReplayError):
    """Records and objectives do not fit together, so no verdict would be true."""

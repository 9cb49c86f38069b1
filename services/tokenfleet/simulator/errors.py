"""What can be wrong with a simulation; one base, and the text is the message."""


class SimulationError(Exception):
    """A simulation cannot start or cannot go on; the text says why."""


class ScenarioError(SimulationError):
    """The scenario is wrong: says where and why, one finding per line."""

    def __init__(self, source: str, findings: list[str]) -> None:
        super().__init__(f"{source}: " + "; ".join(findings))
        self.source = source
        self.findings = findings


class UnknownPolicyError(SimulationError):
    """No policy of this name; the message lists those that exist."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"unknown policy {name!r}; known: {', '.join(known)}")
        self.name = name


class CoreFailedError(SimulationError):
    """A core raised on a message or a wake-up; live it would be logged and skipped, here it is the result."""

    def __init__(self, node: str, what: str, error: Exception) -> None:
        super().__init__(f"{node} failed on {what}: {type(error).__name__}: {error}")
        self.node = node
        self.what = what


class InvariantError(SimulationError):
    """Something that holds whatever any core decides did not hold at the end of a run."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__("; ".join(findings[:10]) + (f"; and {len(findings) - 10} more" if len(findings) > 10 else ""))
        self.findings = findings

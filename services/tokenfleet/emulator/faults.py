"""Faults on command: which are active, and which the next request meets. Refuses to know how they are acted out."""

import msgspec

#: what each kind does to an instance
KINDS: dict[str, str] = {
    "refuse": "requests are answered `status` (503), like a full queue; n requests if `count`",
    "hang": "requests are accepted and never answered",
    "reset": "the connection is reset (TCP RST) after `n` tokens; 0: after the role chunk",
    "slow": "steps take `factor` times as long",
    "error_first": "200, then an error as the first event; not streamed: 503",
    "freeze_metrics": "/metrics keeps showing the page of this moment",
    "split_done": "the final `data: [DONE]` comes in two pieces, cut after `n` bytes",
    "no_done": "the stream ends without [DONE]; with `truncate` also without the end of the HTTP body",
    "stall": "requests run and no token comes",
    "restart": "in place: open requests broken, cache empty, counters zero; the port is closed for `down_ms`",
    "none": "all of these end",
}


class FaultError(ValueError):
    """The command is not a fault; the message says what would be."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One command as posted to `/faults`."""

    kind: str
    #: reset: tokens; split_done: bytes
    n: int = 0
    #: slow
    factor: float = 4.0
    #: requests that meet it before it ends; null: all until told otherwise
    count: int | None = None
    #: refuse, hang: `requests` or `all` (health and metrics too)
    scope: str = "requests"
    #: refuse
    status: int = 503
    #: no_done
    truncate: bool = False
    #: split_done: between the pieces
    pause_ms: float = 20.0
    #: restart
    down_ms: float = 0.0


def parse(body: bytes) -> Fault:
    """A posted command. Raises `FaultError`."""
    try:
        fault = msgspec.json.decode(body, type=Fault)
    except msgspec.DecodeError as error:
        raise FaultError(str(error)) from None
    if fault.kind not in KINDS:
        raise FaultError(f"unknown kind {fault.kind!r}; known: {', '.join(KINDS)}")
    if fault.scope not in ("requests", "all"):
        raise FaultError(f"scope is 'requests' or 'all', not {fault.scope!r}")
    if fault.factor <= 0 or fault.n < 0 or fault.down_ms < 0 or fault.pause_ms < 0:
        raise FaultError("factor must be positive; n, down_ms and pause_ms not negative")
    if fault.count is not None and fault.count < 1:
        raise FaultError("count must be at least 1")
    return fault


class Faults:
    """The active faults of an instance, at most one of a kind."""

    def __init__(self) -> None:
        self._active: dict[str, Fault] = {}
        self._left: dict[str, int] = {}

    def add(self, fault: Fault) -> None:
        """A later command of a kind replaces the earlier one."""
        self._active[fault.kind] = fault
        self._left.pop(fault.kind, None)
        if fault.count is not None:
            self._left[fault.kind] = fault.count

    def clear(self) -> None:
        """No fault from now on."""
        self._active.clear()
        self._left.clear()

    def get(self, kind: str) -> Fault | None:
        """The active fault of a kind, without using it up."""
        return self._active.get(kind)

    def meet(self, kind: str) -> Fault | None:
        """The active fault of a kind for one request; counts it."""
        fault = self._active.get(kind)
        if fault is not None and kind in self._left:
            self._left[kind] -= 1
            if self._left[kind] == 0:
                del self._active[kind], self._left[kind]
        return fault

    def active(self) -> list[Fault]:
        """All of them."""
        return list(self._active.values())

"""CPU time of a process and everything it started, read from the kernel.

Decides which processes belong to a tree (by parent) and nothing else. Needs `/proc`; elsewhere it says so by None.
Source: proc(5), `/proc/PID/stat` fields 4 (ppid), 14–17 (utime, stime and those of reaped children) and 22 (start).
"""

import os
from pathlib import Path

import msgspec

_PROC = Path("/proc")


class _Process(msgspec.Struct, frozen=True):
    parent: int
    #: clock ticks since boot at which it started: with the id, its identity
    started: int
    own_s: float
    reaped_s: float


class TreeUsage:
    """CPU seconds that the trees under some roots used since this object was made.

    Processes that ended in between still count as long as a parent of theirs in the tree reaped them.
    """

    def __init__(self, *roots: int) -> None:
        self._roots = roots
        self._before = _tree(roots)

    def seconds(self) -> float | None:
        """CPU seconds so far; None where there is no `/proc`."""
        if self._before is None:
            return None
        now = _tree(self._roots)
        if now is None:
            return None
        used = 0.0
        for key, process in now.items():
            before = self._before.get(key)
            used += process.own_s + process.reaped_s
            if before is not None:
                used -= before.own_s + before.reaped_s
        # One that ended was counted again, whole, as its parent's reaped time: its share from before goes.
        gone = set(self._before) - set(now)
        return max(0.0, used - sum(self._before[key].own_s + self._before[key].reaped_s for key in gone))


def descendants(*roots: int) -> list[tuple[int, int]]:
    """(process id, start) of everything under the roots, themselves included; nothing where there is no `/proc`."""
    return sorted(_tree(roots) or {})


def alive(pid: int, started: int) -> bool:
    """Whether this very process still runs: an id that went to another process, or a zombie, does not."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return False
    fields = text.rpartition(")")[2].split()
    return fields[0] not in ("Z", "X") and int(fields[19]) == started


def _tree(roots: tuple[int, ...]) -> dict[tuple[int, int], _Process] | None:
    """(id, start) → process, for everything under the roots."""
    if not (_PROC / "self" / "stat").exists():
        return None
    found: dict[int, _Process] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue  # it ended while we read
        # The name, in parentheses, may itself hold spaces and parentheses.
        fields = text.rpartition(")")[2].split()
        own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        found[int(entry.name)] = _Process(int(fields[1]), int(fields[19]), own / ticks, reaped / ticks)
    children: dict[int, list[int]] = {}
    for pid, process in found.items():
        children.setdefault(process.parent, []).append(pid)
    tree: dict[tuple[int, int], _Process] = {}
    waiting = [root for root in roots if root in found]
    while waiting:
        pid = waiting.pop()
        key = (pid, found[pid].started)
        if key not in tree:
            tree[key] = found[pid]
            waiting += children.get(pid, [])
    return tree

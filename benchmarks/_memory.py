"""Memory of this process. Knows nothing of what is measured."""

from pathlib import Path


def peak_rss_bytes() -> int:
    """The largest resident set since this program began.

    Not `getrusage`'s `ru_maxrss`: that keeps the peak of the process that forked this one across exec (Linux,
    `setmax_mm_hiwater_rss` in fs/exec.c), so a small child of a large parent seems large.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status names no VmHWM")

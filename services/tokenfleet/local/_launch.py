"""Become another program that dies with its parent: `python -I -S _launch.py UID GID SIGNAL PARENT -- ARGV…`.

Not a module to import. A separate step between fork and exec, because `preexec_fn` may deadlock a threaded parent. It
drops to UID and GID (-1: stay), asks the kernel for SIGNAL when the parent's main thread ends (even by kill -9) and
replaces itself by ARGV under the same process id.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    uid, gid, death_signal, parent = (int(word) for word in sys.argv[1:5])
    argv = sys.argv[6:]
    if gid >= 0:
        os.setgroups([])
        os.setgid(gid)
    if uid >= 0:
        os.setuid(uid)
    # after setuid: the kernel forgets the wish when credentials change
    if sys.platform == "linux":
        if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            sys.exit("cannot ask for a signal on the parent's death")
        if os.getppid() != parent:
            sys.exit("parent is gone")
    try:
        os.execve(argv[0], argv, os.environ)
    except OSError as error:
        sys.exit(f"cannot run {argv[0]}: {error}")


if __name__ == "__main__":
    main()

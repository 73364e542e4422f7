"""Start processes that end together with their parent, even if the parent is killed. This works on Linux only.

`python -m jpipe_train.launch.local.child PID COMMAND …` replaces itself by the command. A program with threads, such as JAX's,
starts processes in this way. A `preexec_fn` would run in a copy of the program without its threads, and could deadlock on their locks.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with(parent: int) -> None:
    """Make the kernel end this process when the process `parent` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent was killed just before
        os._exit(1)


def command(words: Sequence[str]) -> list[str]:
    """Return a command that runs `words` (a program's path and its arguments), and ends together with this process."""
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), *words]


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - the process that starts this one gives the command

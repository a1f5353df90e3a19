"""No process outlives the one that started it. Imports nothing slow: it counts from the first moment on."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the system kill this process when the one that started it ends, however it ends, and the same for processes
    forked from this one (Linux; elsewhere nothing happens)."""

    def ask() -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    if "TORCHELASTIC_RUN_ID" in os.environ:  # under torchrun; a shell may well end before what it started
        ask()
    os.register_at_fork(after_in_child=ask)

"""No process outlives the one that started it. Imports nothing slow: it counts from the first moment on."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(whoever: bool = False) -> None:
    """Let the system kill this process when the one that started it ends, however it ends, and the same for processes
    forked from this one (Linux; elsewhere nothing happens).

    Args:
        whoever: started it; else only torchrun counts, as a shell may well end before what it started.
    """

    def ask() -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    if whoever or "TORCHELASTIC_RUN_ID" in os.environ:
        ask()
    os.register_at_fork(after_in_child=ask)

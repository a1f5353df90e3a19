"""The folders that a run writes to: proven before data is read, nobody else's while it runs, nothing overwritten."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import logger


def prove_writable(folders: dict[str, Path]) -> None:
    """Make every folder, and write, rename and delete a file in it.

    Args:
        folders: {flag and value that name it: folder}.

    Raises:
        ConfigError: for all that fail.
    """
    problems = []
    for flag, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe-{socket.gethostname()}-{os.getpid()}"
            probe.write_text("x")
            probe.rename(probe.with_suffix(".renamed"))
            probe.with_suffix(".renamed").unlink()
        except OSError as error:
            problems.append(f"{flag}: cannot be written to ({error.strerror})")
    if problems:
        raise ConfigError(*problems)


def take(folder: Path) -> IO[str]:
    """Lock a run's folder until the returned file is closed, or this process ends.

    Raises:
        ConfigError: another run has it, named by host and process.
    """
    file = (folder / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(
            f"--job.dump_folder {folder}: another run writes there ({file.read().strip()}); wait for it, or choose "
            "another folder"
        ) from None
    except OSError:  # a file system without locks
        return file
    file.truncate(0)
    file.write(f"host {socket.gethostname()}, process {os.getpid()}\n")
    file.flush()
    return file


def set_aside(paths: Iterable[Path]) -> None:
    """Rename what an earlier run has left, so that a new one begins with nothing and loses nothing."""
    now = time.strftime("%Y%m%d-%H%M%S")
    for path in paths:
        if path.exists():
            with contextlib.suppress(FileNotFoundError):
                aside = path.with_name(f"{path.stem}-until-{now}{path.suffix}")
                path.rename(aside)
                logger.info(f"A new run begins in {path.parent}: the {path.name} of an earlier one is now {aside.name}")

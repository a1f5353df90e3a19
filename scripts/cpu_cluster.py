"""Processes of one machine as a small cluster: every rank gets an equal CPU share of its own.

More ranks than cores do not run in parallel, so a rank that waits would leave its time to the others and balance would
gain nothing. With a quota for each (a control group) what a waiting rank does not use is lost, as on a machine of its
own.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_wlb.parallelisms.distributed import init_distributed

# A rank that has waited begins with its whole quota at once: pipeline steps made of busy loops took 0.92 to 0.97 of
# their true time with 9 ms (steps with more waiting the less), 0.98 to 1.02 with 2.25 ms. With 1.1 ms, switching from
# rank to rank takes so much that micro-batches of short documents ran 14% slower with all ranks busy than alone.
QUOTA_US = 2_250  # of every period
_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # version 1, version 2
_ENVIRONMENT = "WLB_CPU_GROUP"
# glibc gives large blocks back to the system when they are freed, and every new one costs page faults (a 64 MB tensor
# is filled three times slower). Kept, as a GPU's caching allocator does.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}


def _make_group(name: str, share: float) -> Path:
    """A control group whose processes together use at most `share` of a core.

    Raises:
        OSError: this machine does not let us.
    """
    period = int(QUOTA_US / share)
    root = next((r for r in _ROOTS if (r / "cgroup.procs").exists()), None)
    if root is None:
        raise OSError("no control groups are mounted")
    group = root / name
    group.mkdir()
    try:
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        else:
            (group / "cpu.max").write_text(f"{QUOTA_US} {period}")
    except OSError:
        group.rmdir()
        raise
    return group


@contextlib.contextmanager
def cpu_groups(n: int, share: float | None) -> Iterator[list[str]]:
    """Control groups for n ranks, removed afterwards; "" for each if share is None.

    Raises:
        SystemExit: quotas are not available here.
    """
    groups: list[Path] = []
    try:
        if share is not None:
            for rank in range(n):
                groups.append(_make_group(f"wlb-{os.getpid()}-{rank}", share))
    except OSError as error:
        for g in groups:
            g.rmdir()
        sys.exit(
            f"{n} ranks on {os.cpu_count()} cores need CPU quotas, and this machine does not let us set them "
            f"({error}): run as root with control groups, or take a layout of at most {os.cpu_count()} ranks."
        )
    try:
        yield [str(g) for g in groups] or [""] * n
    finally:
        for g in groups:
            for _ in range(100):  # a group can be removed once its last process is gone
                with contextlib.suppress(OSError):
                    g.rmdir()
                    break
                time.sleep(0.1)


def enter_group() -> None:
    """Put this process, imports done, under its quota, and keep it on one core: ranks that wander meet now and then on
    one core while another is idle. Also gloo's threads: the kernel may give one core the quota of a whole period, and
    a thread on another then waits for the next (small reductions took about twice the time)."""
    if group := os.environ.get(_ENVIRONMENT):
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[int(os.environ["RANK"]) % len(cores)]})


def leave_group() -> None:
    """No quota any more, for work that is not timed."""
    if group := os.environ.get(_ENVIRONMENT):
        (Path(group).parent / "cgroup.procs").write_text(str(os.getpid()))


def launch(arguments: list[str], n: int, share: float | None, timeout: float) -> None:
    """Run `python arguments` as n ranks, and stop all when one fails or the time is up.

    Raises:
        SystemExit: with the status of the rank that failed.
    """
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    with cpu_groups(n, share) as groups:
        ranks = []
        for rank, group in enumerate(groups):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            environment = os.environ | {k: str(v) for k, v in names.items()}
            environment |= {"MASTER_ADDR": "localhost", _ENVIRONMENT: group} | KEEP_MEMORY
            ranks.append(subprocess.Popen([sys.executable, *arguments], env=environment))
        deadline = time.monotonic() + timeout
        try:
            while any(p.poll() is None for p in ranks):
                if failed := [p.returncode for p in ranks if p.returncode]:
                    sys.exit(failed[0])
                if time.monotonic() > deadline:
                    sys.exit(f"stopped after {timeout:.0f} s")
                time.sleep(0.2)
            if failed := [p.returncode for p in ranks if p.returncode]:
                sys.exit(failed[0])
        finally:
            for p in ranks:
                p.kill()
                p.wait()


def as_ranks(work: Callable[[], None], arguments: list[str], n: int, share: float | None, timeout: float) -> None:
    """The main of a script that starts its own ranks: `work` in each of them, with a process group; else `launch`."""
    if "RANK" not in os.environ:
        launch(arguments, n, share, timeout)
        return
    init_distributed(torch.device("cpu"), 600)
    torch.set_num_threads(1)
    work()
    dist.barrier()
    dist.destroy_process_group()

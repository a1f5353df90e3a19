"""Run a function in N gloo ranks on this machine, with a time limit."""

import datetime
import multiprocessing
import os
import socket
import time
import traceback

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torchtitan_wlb.models.llama", "torchtitan_wlb.parallelisms.parallelize_llama"]
)


def _enter(function, rank: int, world_size: int, port: int, args, failures) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        function(*args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        failures.put(f"rank {rank}:\n{traceback.format_exc()}")
        raise SystemExit(1) from None


def run_ranks(world_size: int, function, *args, timeout: float = 240) -> None:
    """Call function(*args) in world_size processes with an initialised gloo group.

    Raises:
        AssertionError: a rank failed (its traceback is the message) or the time ran out.
    """
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    failures = _context.SimpleQueue()
    ranks = [
        _context.Process(target=_enter, args=(function, r, world_size, port, args, failures)) for r in range(world_size)
    ]
    for p in ranks:
        p.start()
    deadline = time.monotonic() + timeout
    try:
        while any(p.is_alive() for p in ranks):
            if any(p.exitcode not in (None, 0) for p in ranks) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        time.sleep(0.2)
        alive = [r for r, p in enumerate(ranks) if p.is_alive()]
        messages = []
        while not failures.empty():
            messages.append(failures.get())
        assert not messages, "\n".join(messages)
        assert time.monotonic() <= deadline, f"ranks {alive} did not end within {timeout} s"
        assert all(p.exitcode == 0 for p in ranks), [p.exitcode for p in ranks]
    finally:
        for p in ranks:
            p.kill()
            p.join()

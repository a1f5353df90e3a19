"""Process groups: start, time limits, and the agreement of all ranks on what they are about to do."""

import datetime
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from torchtitan_wlb import torch_private


def select_device() -> torch.device:
    """This rank's device, made current: its CUDA device, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def init_distributed(
    device: torch.device, timeout_seconds: int, trace_buf_size: int = 0, trace_folder: str = ""
) -> None:
    """Start the default process group: NCCL for CUDA tensors, gloo for CPU tensors.

    Args:
        trace_buf_size: collectives that NCCL's flight recorder remembers; after a time-out it writes them to
            trace_folder.
    """
    if device.type == "cuda" and trace_buf_size:
        os.makedirs(trace_folder, exist_ok=True)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(trace_buf_size))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{trace_folder}/rank_")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        try:
            dist.init_process_group(backend, timeout=timeout)
        except dist.DistError as error:
            raise RuntimeError(
                f"Rank {os.environ['RANK']} has waited {timeout_seconds} s (--comm.init_timeout_seconds) for another "
                "to start: it has ended, or is late (tokenising on its machine?)"
            ) from error
    else:  # without a launcher: one process, which listens to nobody
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def set_timeouts(seconds: int, groups: Iterable[dist.ProcessGroup]) -> None:
    """Shorten the time limit of the default group and others, after the slow first step. Barrier first: no collective
    may be under way."""
    dist.barrier()
    set_timeout = getattr(dist, "set_timeout", None) or torch_private.set_timeout
    for group in {None, *groups}:
        set_timeout(datetime.timedelta(seconds=seconds), group)


def check_agreement(what: dict[str, str]) -> None:
    """Compare strings that must be equal on all ranks.

    Raises:
        RuntimeError: on every rank, naming what differs and the ranks that differ from rank 0.
    """
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, what)
    problems = [
        f"{key}: rank 0 has {everyone[0][key]}, rank {rank} has {theirs[key]}"
        for key in what
        for rank, theirs in enumerate(everyone)
        if theirs[key] != everyone[0][key]
    ]
    if problems:
        raise RuntimeError("The ranks do not agree:\n  " + "\n  ".join(problems[:8]))

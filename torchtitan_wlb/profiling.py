"""Chrome traces and CUDA memory snapshots of some steps; null contexts when switched off."""

import contextlib
from pathlib import Path

import torch

from torchtitan_wlb.config import Profiling
from torchtitan_wlb.logger import logger


@contextlib.contextmanager
def maybe_profile(config: Profiling, dump_folder: str, rank: int):
    """Yields an object whose `step()` is called after every training step, or None."""
    if not config.enable_profiling:
        yield None
        return
    folder = Path(dump_folder) / config.save_traces_folder
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def write(profiler) -> None:
        path = folder / f"step-{profiler.step_num}"
        path.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path / f"rank{rank}.json"))
        logger.info(f"Trace written to {path}")

    wait = max(0, config.profile_freq - 2)
    schedule = torch.profiler.schedule(wait=wait, warmup=1 if config.profile_freq > 1 else 0, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:
        yield profiler


@contextlib.contextmanager
def maybe_memory_snapshot(config: Profiling, dump_folder: str, rank: int):
    """Records CUDA allocations and writes them when training ends or runs out of memory."""
    if not (config.enable_memory_snapshot and torch.cuda.is_available()):
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    finally:
        path = Path(dump_folder) / config.save_traces_folder
        path.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path / f"memory-rank{rank}.pickle"))

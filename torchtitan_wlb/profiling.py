"""Chrome traces, times of micro-batches, CUDA memory snapshots; next to nothing when switched off."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from torchtitan_wlb.config import Profiling
from torchtitan_wlb.logger import logger


@contextlib.contextmanager
def maybe_enable_profiling(config: Profiling, dump_folder: str, rank: int):
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
def maybe_enable_memory_snapshot(config: Profiling, dump_folder: str, rank: int):
    """Records CUDA allocations and writes them when training ends or runs out of memory."""
    if not (config.enable_memory_snapshot and torch.cuda.is_available()):
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    finally:
        path = Path(dump_folder) / config.save_memory_snapshot_folder
        path.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path / f"rank{rank}.pickle"))


class MicroBatchClock:
    """Names the parts of micro-batches in traces and, if asked, times them on this rank.

    On a CPU the thread's own seconds count, without its waiting for other ranks. On CUDA the time between two events of
    the stream counts, and with it what the stream waits for in between.
    """

    def __init__(self, device: torch.device, timed: bool):
        self.timed = timed
        self._is_cuda = device.type == "cuda"
        self._labels: list[str] = []
        self._parts: list[list[tuple]] = []

    def begin_step(self, labels: list[str]) -> None:
        """Forget the last step; labels of the micro-batches to come, in training order."""
        self._labels, self._parts = labels, [[] for _ in labels]

    @contextlib.contextmanager
    def part(self, what: str, i: int) -> Iterator[None]:
        """Around the forward or the backward of micro-batch i in a stage."""
        with torch.profiler.record_function(f"{what} of micro-batch {i}, {self._labels[i]}"):
            if not self.timed:
                yield
                return
            began = self._now()
            yield
            self._parts[i].append((began, self._now()))

    def _now(self):
        if not self._is_cuda:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> list[float]:
        """Seconds of every micro-batch of the step on this rank; waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()
            return [sum(a.elapsed_time(b) for a, b in parts) * 1e-3 for parts in self._parts]
        return [sum(b - a for a, b in parts) for parts in self._parts]

"""One record a logged step: console columns, metrics.jsonl, TensorBoard, Weights & Biases, all with the same
numbers."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from torchtitan_wlb.config import Metrics
from torchtitan_wlb.context_parallel.selection import KINDS as SHARDINGS
from torchtitan_wlb.cost.model_shape import ModelShape
from torchtitan_wlb.evaluation import as_scalars, in_words, over_all
from torchtitan_wlb.logger import Color, NoColor, logger
from torchtitan_wlb.parallelisms.step_sums import read_steps

ALL_SHARDINGS = ("whole", *SHARDINGS)


def _shown(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: null is in its place."""
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl; lines that are none (such as a last one that a crash cut short) are left out and
    named."""
    records = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            record = json.loads(line, parse_constant=lambda _: None)  # JSON has no NaN
            if type(record["step"]) is not int:
                raise TypeError
            records.append(record)
        except (ValueError, TypeError, KeyError, RecursionError):
            logger.warning(f"Line {number} of {path} is no record of a step and is left out")
    return records


class MetricLogger:
    """Collects steps; `log` writes the record of the last one. Only rank 0 writes.

    Args:
        metrics: which sinks.
        job: the whole configuration, logged to TensorBoard and Weights & Biases.
        shape: of the model, for FLOPs.
        dump_folder: of the run.
        resumed_step: later lines of metrics.jsonl are dropped (they will be trained again).
        peak: FLOP/s of one device, None if unknown.
    """

    def __init__(
        self,
        metrics: Metrics,
        job: dict[str, Any],
        shape: ModelShape,
        *,
        dump_folder: Path,
        rank: int,
        world_size: int,
        resumed_step: int,
        peak: float | None,
    ):
        self.shape, self.world_size, self.peak = shape, world_size, peak
        self.color = Color if metrics.enable_color else NoColor
        self.writes = rank == 0
        self._file = self._tensorboard = self._wandb = None
        if self.writes:
            path = dump_folder / "metrics.jsonl"
            kept = [record for record in read_records(path) if record["step"] <= resumed_step]
            path.write_text("".join(json.dumps(record) + "\n" for record in kept))
            self._file = path.open("a")
            if metrics.enable_tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._tensorboard = SummaryWriter(
                    str(dump_folder / metrics.save_tb_folder), purge_step=resumed_step + 1
                )
                self._tensorboard.add_text("config", json.dumps(job, indent=2))
            if metrics.enable_wandb:
                import wandb

                self._wandb = wandb.init(project=metrics.wandb_project, config=job, dir=str(dump_folder))
        self.start_window()

    def start_window(self) -> None:
        """Begin to measure; call after everything that is not training."""
        self._began = time.perf_counter()
        self._paused = 0.0
        self._tokens = self._pairs = 0
        self._tables: list[torch.Tensor] = []

    def pause(self, seconds: float) -> None:
        """Do not count time that was spent on something else (checkpoints, validation)."""
        self._paused += seconds

    def add(self, record: dict[str, Any], table: torch.Tensor) -> None:
        """Count a trained step.

        Args:
            record: its numbers, some of them still on the device; they are read when they are logged.
            table: of parallelisms.step_sums.gather_step.
        """
        self._record = record
        self._tokens += record["tokens"]
        self._pairs += record["attended_pairs"]
        self._tables.append(table)

    def add_validation(self, sets: dict[str, dict]) -> None:
        """Put the losses over held-out documents (evaluation.evaluate) into the record of the step added last."""
        loss, targets = over_all(sets)
        self._record |= {"validation_loss": loss, "validation_targets": targets, "validation": sets}

    def check(self) -> None:
        """Make sure, before a checkpoint, that all ranks trained the same plans since the last log."""
        if self._tables:
            read_steps(self._tables, ALL_SHARDINGS)

    def log(self) -> None:
        """Write the record of the last step, completed by the rates since the last log; nothing if there is no new
        step. The only place where the host waits for the device."""
        if not self._tables:
            return
        sums = read_steps(self._tables, ALL_SHARDINGS)
        self._record |= {
            "loss": sums.loss if self._record["grad_norm"] is not None else None,
            "imbalance_cp": sums.cp_work_max / sums.cp_work_mean,
            "imbalance_dp": sums.step_seconds_max / sums.step_seconds_mean,
            "predicted_step_time_s": sums.step_seconds_max,
            "cp_sharding": sums.sharding,
        }
        seconds, steps = time.perf_counter() - self._began - self._paused, len(self._tables)
        rates = {"tps": self._tokens / seconds / self.world_size, "mfu": None, "step_time_s": seconds / steps}
        if self.peak:
            flops = self.shape.training_flops(self._tokens, self._pairs)
            rates["mfu"] = flops / seconds / self.world_size / self.peak
        if self.writes:
            self._write(self._record | rates)
        self.start_window()

    def _write(self, r: dict[str, Any]) -> None:
        assert self._file is not None
        r = _without_nan(r)
        self._file.write(json.dumps(r, allow_nan=False) + "\n")
        self._file.flush()
        scalars = {k: v for k, v in r.items() if isinstance(v, (int, float)) and k != "step"}
        scalars |= as_scalars(r.get("validation", {}))
        if self._tensorboard is not None:
            for k, v in scalars.items():
                self._tensorboard.add_scalar(k, v, r["step"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=r["step"])
        c = self.color
        for name, result in r.get("validation", {}).items():
            logger.info(f"{c.cyan}{name} after step {r['step']}: {in_words(result)}{c.reset}")
        mfu = "" if r["mfu"] is None else f"  {c.magenta}mfu {r['mfu']:6.2%}"
        logger.info(
            f"{c.red}step {r['step']:>5}  {c.green}loss {_shown(r['loss'], 7, 4)}  "
            f"{c.yellow}norm {_shown(r['grad_norm'], 7, 3)}  "
            f"{c.blue}tokens {r['tokens']:>8,}  "
            f"{c.cyan}imbalance mb {r['imbalance_micro_batch']:.3f} cp {r['imbalance_cp']:.3f}  "
            f"{c.magenta}delay {r['delay_mean_steps']:.2f}  {c.blue}tps {r['tps']:>8,.0f}{mfu}  "
            f"{c.yellow}{r['step_time_s']:.2f} s{c.reset}"
        )

    def close(self) -> None:
        for sink in (self._file, self._tensorboard):
            if sink is not None:
                sink.close()
        if self._wandb is not None:
            self._wandb.finish()

"""Save and resume: parameters and optimizer through torch.distributed.checkpoint, planner state as a small JSON beside
them.

<folder>/step-100/run_state.json     step, packing settings, planner state: global, read before any process group exists
<folder>/step-100/*.distcp           every rank's shards, named by parameter: loadable in another layout
<folder>/step-100/.metadata          written last: a checkpoint without it is not complete and is never loaded
"""

import re
import shutil
import time
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import logger
from torchtitan_wlb.optimizer import OptimizersContainer
from torchtitan_wlb.run_state import FILE, RunState

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def step_folders(folder: Path) -> dict[int, Path]:
    """{step: folder} of the checkpoints in a folder, complete or not, by rising step; other names are not ours."""
    found = {m[1]: p for p in folder.glob("step-*") if p.is_dir() and (m := re.fullmatch(r"step-(\d+)", p.name))}
    return {int(step): found[step] for step in sorted(found, key=int)}


def is_complete(path: Path) -> bool:
    return all((path / name).exists() for name in (".metadata", FILE))


def find_checkpoint(folder: Path, load_step: int = -1) -> Path | None:
    """The checkpoint to resume from: a given step, or the newest complete one; None for a fresh run.

    Raises:
        ConfigError: the given step does not exist or is not complete, naming those that are.
    """
    steps = step_folders(folder)
    complete = [s for s, path in steps.items() if is_complete(path)]
    for s in steps.keys() - set(complete):
        logger.warning(f"{steps[s]} is not a complete checkpoint and is passed over")
    if load_step != -1 and load_step not in complete:
        legal = ", ".join(map(str, complete)) or "none"
        raise ConfigError(f"--checkpoint.load_step {load_step}: complete checkpoints in {folder}: {legal}")
    if not complete:
        return None
    return steps[complete[-1] if load_step == -1 else load_step]


def set_aside_later(checkpoint: Path) -> None:
    """Rename the checkpoints after the one that is resumed: their steps will be trained again, and the newest one must
    not win next time."""
    resumed = int(checkpoint.name.removeprefix("step-"))
    for step, path in step_folders(checkpoint.parent).items():
        if step > resumed:
            aside = path.with_name(f"set-aside-{path.name}-{time.time_ns()}")
            path.rename(aside)
            logger.warning(f"{path} comes after the resumed step {resumed}: renamed to {aside.name}")


class CheckpointManager:
    """Writes and loads the checkpoints of a run. All ranks call every method.

    Args:
        folder: of the checkpoints.
        optimizers: with their models; empty parts of other pipeline ranks are merged by name.
        keep_latest_k: complete checkpoints kept, 0 for all.
        asynchronous: write from a background thread; `finish` (and the next save) waits for it.
    """

    def __init__(self, folder: Path, optimizers: OptimizersContainer, keep_latest_k: int, asynchronous: bool):
        self.folder, self.optimizers, self.keep, self.asynchronous = (
            folder,
            optimizers,
            keep_latest_k,
            asynchronous,
        )
        self._pending: Future | None = None
        # The background thread's collectives must not mix with those of training.
        self._group = dist.new_group(backend="gloo") if asynchronous else None

    def _state(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        state: dict[str, dict[str, Any]] = {k: {} for k in ("model", "optimizer") if k not in exclude}
        for part, optimizer in self._parts():
            state["model"] |= get_model_state_dict(part, options=_OPTIONS)
            if "optimizer" in state:
                state["optimizer"] |= get_optimizer_state_dict(part, optimizer, options=_OPTIONS)
        return state

    def _parts(self):
        return zip(self.optimizers.model_parts, self.optimizers.optimizers)

    def save(self, run_state: RunState) -> None:
        """Save the checkpoint of run_state.step. A model with a weight that is not finite is not saved, and no earlier
        checkpoint is deleted for it."""
        self.finish()
        if not self._is_finite():
            logger.error(f"Not saved after step {run_state.step}: a weight is not finite")
            return
        path = self.folder / f"step-{run_state.step}"
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            (path / FILE).write_text(run_state.model_dump_json())
        dist.barrier()
        if self.asynchronous:
            self._pending = cast(
                Future, dcp.async_save(self._state(), checkpoint_id=str(path), process_group=self._group)
            )
        else:
            dcp.save(self._state(), checkpoint_id=str(path))
        logger.info(f"Saved {'(in the background) ' if self.asynchronous else ''}{path}")
        self._delete_old()

    def _is_finite(self) -> bool:
        """Whether all weights on all ranks are finite."""
        parts = [p.detach() for part in self.optimizers.model_parts for p in part.parameters()]
        local = [p.to_local() if isinstance(p, DTensor) else p for p in parts]
        bad = torch.stack([(~x.isfinite()).any() for x in local]).any().float()
        dist.all_reduce(bad)
        return not bad.item()

    def finish(self) -> None:
        """Wait for a checkpoint that is being written; raises what went wrong with it."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _delete_old(self) -> None:
        if self.keep and dist.get_rank() == 0:
            complete = [path for path in step_folders(self.folder).values() if is_complete(path)]
            for path in complete[: -self.keep]:
                (path / ".metadata").unlink()  # first, so that a half-deleted checkpoint never looks complete
                shutil.rmtree(path)

    def load(self, checkpoint: Path, exclude: Collection[str] = ()) -> None:
        """Load parameters and (unless "optimizer" is in exclude) optimizer state, whatever layout saved them."""
        state = self._state(exclude)
        try:
            dcp.load(state, checkpoint_id=str(checkpoint))
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            failures = getattr(error, "failures", {})
            cause = next(iter(failures.values()))[0] if failures else error
            raise ConfigError(
                f"--checkpoint.load_step: {checkpoint} cannot be loaded ({type(cause).__name__}: {str(cause)[:300]}); "
                "remove it, or choose another step"
            ) from None
        for part, optimizer in self._parts():
            names = set(get_model_state_dict(part, options=_OPTIONS))
            set_model_state_dict(part, {k: v for k, v in state["model"].items() if k in names}, options=_OPTIONS)
            if "optimizer" in state:
                configured = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in optimizer.param_groups]
                set_optimizer_state_dict(part, optimizer, state["optimizer"], options=_OPTIONS)
                _keep_configured(optimizer, configured)
        logger.info(f"Loaded {checkpoint}")


def _keep_configured(optimizer: torch.optim.Optimizer, configured: list[dict[str, Any]]) -> None:
    """Of hyperparameters the configured values count, not those of the checkpoint; every change is logged."""
    changes = set()
    for group, wanted in zip(optimizer.param_groups, configured):
        changes |= {f"{k} {group[k]} -> {v}" for k, v in wanted.items() if group[k] != v}
        group.update(wanted)
    for change in sorted(changes):
        logger.info(f"Optimizer: as configured, not as in the checkpoint: {change}")

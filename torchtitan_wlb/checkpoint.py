"""Save and resume: parameters and optimizer through torch.distributed.checkpoint, planner state as a small JSON beside
them.

<folder>/step-100/run_state.json     step, packing settings, planner state: global, read before any process group exists
<folder>/step-100/*.distcp           every rank's shards, named by parameter: loadable in another layout
<folder>/step-100/.metadata          written last: a checkpoint without it is not complete and is never loaded
"""

import json
import shutil
import time
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import logger
from torchtitan_wlb.optimizer import OptimizersContainer

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def find_checkpoint(folder: Path, load_step: int = -1) -> Path | None:
    """The checkpoint to resume from: a given step, or the newest complete one; None for a fresh run.

    Raises:
        ConfigError: the given step does not exist or is not complete, naming those that are.
    """
    steps = sorted(
        int(p.name.removeprefix("step-")) for p in folder.glob("step-*") if p.name.removeprefix("step-").isdigit()
    )
    files = (".metadata", "run_state.json")
    complete = [s for s in steps if all((folder / f"step-{s}" / f).exists() for f in files)]
    for s in set(steps) - set(complete):
        logger.warning(f"{folder / f'step-{s}'} is not a complete checkpoint and is passed over")
    if load_step != -1 and load_step not in complete:
        legal = ", ".join(map(str, complete)) or "none"
        raise ConfigError(f"--checkpoint.load_step {load_step}: complete checkpoints in {folder}: {legal}")
    if not complete:
        return None
    return folder / f"step-{complete[-1] if load_step == -1 else load_step}"


def read_run_state(checkpoint: Path, made_with: dict[str, str]) -> dict[str, Any]:
    """{"step", "settings", "planner", "made_with"} of a checkpoint.

    Args:
        made_with: {flag: value} that must be as when it was made.

    Raises:
        ConfigError: the file is damaged, or something was configured differently.
    """
    path = checkpoint / "run_state.json"
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--checkpoint.load_step: {path} cannot be read ({error})") from error
    made = state["made_with"]
    if changed := [k for k, v in made_with.items() if made[k] != v]:
        raise ConfigError(
            *(f"--{k}: the checkpoint was made with {made[k]}, configured is {made_with[k]}" for k in changed)
        )
    return state


def set_aside_later(checkpoint: Path) -> None:
    """Rename the checkpoints after the one that is resumed: their steps will be trained again, and the newest one must
    not win next time."""
    step = int(checkpoint.name.removeprefix("step-"))
    for path in checkpoint.parent.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit() and int(number) > step:
            aside = path.with_name(f"set-aside-{path.name}-{time.time_ns()}")
            path.rename(aside)
            logger.warning(f"{path} comes after the resumed step {step}: renamed to {aside.name}")


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

    def save(self, run_state: dict[str, Any]) -> None:
        """Save the checkpoint of run_state["step"]; run_state is JSON and equal on all ranks."""
        self.finish()
        path = self.folder / f"step-{run_state['step']}"
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            (path / "run_state.json").write_text(json.dumps(run_state))
        dist.barrier()
        if self.asynchronous:
            self._pending = cast(
                Future, dcp.async_save(self._state(), checkpoint_id=str(path), process_group=self._group)
            )
        else:
            dcp.save(self._state(), checkpoint_id=str(path))
        logger.info(f"Saved {'(in the background) ' if self.asynchronous else ''}{path}")
        self._delete_old()

    def finish(self) -> None:
        """Wait for a checkpoint that is being written; raises what went wrong with it."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _delete_old(self) -> None:
        if self.keep and dist.get_rank() == 0:
            complete = sorted(
                self.folder.glob("step-*/.metadata"), key=lambda p: int(p.parent.name.removeprefix("step-"))
            )
            for metadata in complete[: -self.keep]:
                metadata.unlink()  # first, so that a half-deleted checkpoint never looks complete
                shutil.rmtree(metadata.parent)

    def load(self, checkpoint: Path, exclude: Collection[str] = ()) -> None:
        """Load parameters and (unless "optimizer" is in exclude) optimizer state, whatever layout saved them."""
        state = self._state(exclude)
        try:
            dcp.load(state, checkpoint_id=str(checkpoint))
        except Exception as error:
            raise ConfigError(f"--checkpoint.load_step: {checkpoint} cannot be loaded ({error})") from error
        for part, optimizer in self._parts():
            names = set(get_model_state_dict(part, options=_OPTIONS))
            set_model_state_dict(part, {k: v for k, v in state["model"].items() if k in names}, options=_OPTIONS)
            if "optimizer" in state:
                set_optimizer_state_dict(part, optimizer, state["optimizer"], options=_OPTIONS)
        logger.info(f"Loaded {checkpoint}")

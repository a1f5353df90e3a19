"""Save and resume: parameters and optimizer through torch.distributed.checkpoint, planner state as a small JSON beside
them.

<folder>/step-100/run_state.json     step, packing settings, planner state: global, read before any process group exists
<folder>/step-100/*.distcp           every rank's shards, named by parameter: loadable in another layout
<folder>/step-100/.metadata          written last: a checkpoint without it is not complete and is never loaded
"""

import pickle
import re
import shutil
import time
from collections.abc import Collection
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
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
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.optimizer import OptimizersContainer
from torchtitan_wlb.parallelisms.tied_embeddings import COPY
from torchtitan_wlb.run_state import FILE, RunState

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_ASIDE = "set-aside-"
_METADATA_TYPES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}


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
    """Rename the complete checkpoints after the one that is resumed: their steps will be trained again, and the newest
    one must not win next time."""
    resumed = int(checkpoint.name.removeprefix("step-"))
    for step, path in step_folders(checkpoint.parent).items():
        if step > resumed and is_complete(path):
            aside = path.with_name(f"{_ASIDE}{path.name}-{time.time_ns()}")
            path.rename(aside)
            logger.warning(f"{path} comes after the resumed step {resumed}: renamed to {aside.name}")


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the types of `.metadata` and nothing else, so that a file that is handed over cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _METADATA_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def check_metadata(checkpoint: Path) -> None:
    """Read `.metadata` as torch will, without trusting it.

    Raises:
        ConfigError: it is damaged, or holds what no checkpoint holds.
    """
    try:
        with (checkpoint / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
    except Exception as error:  # a pickle that is cut short or flipped ends in any of them
        raise ConfigError(
            f"--checkpoint.load_step: {checkpoint}/.metadata is damaged or not of a checkpoint "
            f"({type(error).__name__}: {str(error)[:200]}); choose another step, or move the checkpoint away"
        ) from None


class CheckpointManager:
    """Writes and loads the checkpoints of a run. All ranks call every method.

    Args:
        folder: of the checkpoints.
        optimizers: with their models; empty parts of other pipeline ranks are merged by name.
        keep_latest_k: complete checkpoints kept, 0 for all.
        asynchronous: write from a background thread; `finish` (and the next save) waits for it.
    """

    def __init__(self, folder: Path, optimizers: OptimizersContainer, keep_latest_k: int, asynchronous: bool):
        self.folder, self.optimizers = folder, optimizers
        self.keep, self.asynchronous = keep_latest_k, asynchronous
        self._pending: tuple[Future, Path] | None = None
        # The background thread's collectives must not mix with those of training.
        self._group = dist.new_group(backend="gloo") if asynchronous else None

    def _parts(self):
        return zip(self.optimizers.model_parts, self.optimizers.optimizers)

    def _tensors(self, exclude: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """{"model" and "optimizer": {name: tensor or DTensor}}. Hyperparameters are no part of it: those configured
        count."""
        state: dict[str, dict[str, Any]] = {k: {} for k in ("model", "optimizer") if k not in exclude}
        for part, optimizer in self._parts():
            saved = partial(_saved_name, part)
            state["model"] |= {saved(k): v for k, v in get_model_state_dict(part, options=_OPTIONS).items()}
            if "optimizer" in state:
                own = _only_tensors(get_optimizer_state_dict(part, optimizer, options=_OPTIONS))
                state["optimizer"] |= {saved(k): v for k, v in own.items()}
        return state

    def save(self, fields: dict[str, Any]) -> None:
        """Save a checkpoint. A model with a weight that is not finite is not saved, and no earlier checkpoint is
        deleted for it.

        Args:
            fields: of the RunState, equal on all ranks.
        """
        run_state = RunState.model_validate(fields)
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
            future = dcp.async_save(self._tensors(), checkpoint_id=str(path), process_group=self._group)
            self._pending = cast(Future, future), path
            logger.info(f"Saving {path} in the background")
        else:
            dcp.save(self._tensors(), checkpoint_id=str(path))
            self._saved(path)

    def finish(self) -> None:
        """Wait for a checkpoint that is being written; raises what went wrong with it."""
        if self._pending is not None:
            (future, path), self._pending = self._pending, None
            future.result()
            self._saved(path)

    def _saved(self, path: Path) -> None:
        """Log it, and delete what it replaces: complete checkpoints and those set aside beyond keep_latest_k each, and
        what earlier starts have left incomplete."""
        logger.info(f"Saved {path}")
        if dist.get_rank() != 0:
            return
        folders = step_folders(self.folder).values()
        old = [p for p in folders if not is_complete(p)]
        if self.keep:
            aside = {
                int(m[1]): p for p in self.folder.iterdir() if (m := re.fullmatch(_ASIDE + r"step-\d+-(\d+)", p.name))
            }
            old += [p for p in folders if is_complete(p)][: -self.keep]
            old += [aside[time] for time in sorted(aside)][: -self.keep]
        for p in old:
            (p / ".metadata").unlink(missing_ok=True)  # first, so that a half-deleted checkpoint never looks complete
            shutil.rmtree(p)

    def _is_finite(self) -> bool:
        """Whether all weights on all ranks are finite."""
        parts = [p.detach() for part in self.optimizers.model_parts for p in part.parameters()]
        local = [p.to_local() if isinstance(p, DTensor) else p for p in parts]
        bad = torch.stack([(~x.isfinite()).any() for x in local]).any().float()
        dist.all_reduce(bad)
        return not bad.item()

    def load(self, checkpoint: Path, exclude: Collection[str] = ()) -> None:
        """Load parameters and (unless "optimizer" is in exclude) optimizer state, whatever layout saved them."""
        check_metadata(checkpoint)
        state = self._tensors(exclude)
        try:
            dcp.load(state, checkpoint_id=str(checkpoint))
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            failures = getattr(error, "failures", {})
            cause = next(iter(failures.values()))[0] if failures else error
            raise ConfigError(
                f"--checkpoint.load_step: {checkpoint} cannot be loaded ({type(cause).__name__}: {str(cause)[:300]}); "
                "choose another step, or move the checkpoint away"
            ) from None
        for part, optimizer in self._parts():
            saved = partial(_saved_name, part)
            names = get_model_state_dict(part, options=_OPTIONS)
            set_model_state_dict(part, {k: state["model"][saved(k)] for k in names}, options=_OPTIONS)
            if "optimizer" in state:
                own = get_optimizer_state_dict(part, optimizer, options=_OPTIONS)
                # A copy of a tied matrix on the rank of the other one: the optimizers must not update one state twice.
                tensors = {k: (state["optimizer"][saved(k)], saved(k) != k) for k in _only_tensors(own)}
                loaded = own | {k: x.clone() if is_copy else x for k, (x, is_copy) in tensors.items()}
                set_optimizer_state_dict(part, optimizer, loaded, options=_OPTIONS)
        logger.info(f"Loaded {checkpoint}")


def _saved_name(part: nn.Module, key: str) -> str:
    """Of an entry of the state: a tied head is saved as the embedding, whatever stage has a copy of it."""
    return key.replace(COPY, "tok_embeddings.weight") if cast(ModelArgs, part.args).is_tied else key


def _only_tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}

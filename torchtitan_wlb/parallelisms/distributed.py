"""Process groups, and the few collectives of a training step that are not inside FSDP, TP, CP or PP.

Private API, torch 2.13: `_set_pg_timeout` (there is no public way to change a time limit), `_StridedShard` (the
placement that FSDP2 over tensor parallelism gives parameters).
"""

import datetime
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims

# torch 2.13 renamed it and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def select_device() -> torch.device:
    """This rank's device, made current: its CUDA device, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def init_distributed(device: torch.device, timeout_seconds: int) -> None:
    """Start the default process group: NCCL for CUDA tensors, gloo for CPU tensors."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        os.environ.setdefault(name, value)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_seconds))


def set_timeouts(seconds: int, mesh: DeviceMesh, cp_group: dist.ProcessGroup | None) -> None:
    """Shorten the time limit of all groups, after the slow first step. Barrier first: no collective may be under
    way."""
    dist.barrier()
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names or ()]
    for group in {None, cp_group, *groups}:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


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


@dataclass
class StepSums:
    """What the ranks told each other after a step."""

    loss: float
    cp_work_max: float
    cp_work_mean: float
    step_seconds_max: float
    step_seconds_mean: float
    sharding: dict[str, int]


def gather_step(
    loss: torch.Tensor,
    plan_hash: str,
    cp_work: tuple[float, float],
    step_seconds: float,
    kinds: dict[str, int],
    counts: bool,
    all_kinds: tuple[str, ...],
) -> torch.Tensor:
    """The one metric collective of a step. Nothing waits for its result until `read_steps`.

    Args:
        loss: this rank's share of the mean loss, to be counted once over tensor-parallel ranks (0 elsewhere).
        plan_hash: 12 hex digits (48 bits are exact in fp64).
        cp_work, step_seconds, kinds: of this rank's step; counted where `counts` (one rank per data-parallel rank).
        all_kinds: the names that kinds may have.

    Returns:
        fp64 [world size, columns] on the device of the loss.
    """
    counted = [1.0, *cp_work, step_seconds, *(kinds.get(k, 0) for k in all_kinds)]
    numbers = [float(int(plan_hash, 16)), *(x if counts else 0.0 for x in counted)]
    row = torch.tensor(numbers, dtype=torch.float64).to(loss.device, non_blocking=True)
    mine = torch.cat([loss.double().reshape(1), row])
    table = mine.new_empty(dist.get_world_size() * len(mine))
    all_gather(table, mine)
    return table.view(-1, len(mine))


def read_steps(tables: list[torch.Tensor], all_kinds: tuple[str, ...]) -> StepSums:
    """Make sure that all ranks trained the same plans in some steps, and sum up the last of them.

    Args:
        tables: of `gather_step`.

    Raises:
        RuntimeError: naming the ranks whose plan differs from rank 0's.
    """
    rows = torch.stack(tables).cpu()
    different = (rows[:, :, 1] != rows[:, :1, 1]).any(0).nonzero().flatten().tolist()
    if different:
        raise RuntimeError(f"Step plans differ: rank(s) {different} did not plan what rank 0 planned")
    total, _, n, slowest, average, seconds, *sharding = rows[-1].sum(0).tolist()
    return StepSums(
        loss=total,
        cp_work_max=slowest,
        cp_work_mean=average,
        step_seconds_max=rows[-1, :, 5].max().item(),
        step_seconds_mean=seconds / n,
        sharding={k: int(n) for k, n in zip(all_kinds, sharding) if n},
    )


def measured_imbalance(seconds: list[float], dims: ParallelDims, device: torch.device) -> float:
    """max / mean of the measured time of all micro-batches of a step, from each rank's seconds [M].

    The stages of a micro-batch add up; of the ranks that share a stage the slowest counts.
    """
    mine = torch.tensor(seconds, dtype=torch.float64, device=device)
    table = mine.new_empty(dims.world_size * len(mine))
    all_gather(table, mine)
    took = table.view(dims.pp, dims.dp, dims.cp * dims.tp, -1).amax(2).sum(0)
    return (took.max() / took.mean()).item()


@torch.no_grad()
def clip_grad_norm(parameters: list[nn.Parameter], max_norm: float, device: torch.device) -> torch.Tensor:
    """Norm of the whole gradient over all ranks and stages; gradients are scaled down to max_norm if it is larger (0:
    never).

    Every rank adds the squares of its local shards, divided by the number of ranks that hold the same numbers; one
    all-reduce over all ranks gives the square of the norm.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[torch.Tensor]] = {}
    for p in parameters:
        if p.grad is None:
            continue
        grad = p.grad
        copies = 1
        if isinstance(grad, DTensor):
            sharded = [isinstance(x, (Shard, _StridedShard)) for x in grad.placements]
            copies = math.prod(n for n, s in zip(grad.device_mesh.shape, sharded) if not s)
            grad = grad.to_local()
        by_copies.setdefault(copies, []).append(grad)
    for copies, grads in by_copies.items():
        norms = torch._foreach_norm([g for g in grads if g.numel()])
        if norms:
            total += torch.stack(norms).double().square().sum() / copies
    dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grads in by_copies.values():
            torch._foreach_mul_(grads, scale.to(grads[0].dtype))
    return norm

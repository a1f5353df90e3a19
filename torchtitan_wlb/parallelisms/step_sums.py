"""What the ranks tell each other after a step: one collective, read when a step is logged."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims

# torch 2.13 renamed it and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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

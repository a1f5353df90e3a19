"""Pipeline schedules as lists of actions, and what they demand of micro-batch counts.

The same lists feed the runtime (varlen_stage.py) and the time model (cost/step_time.py).
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from torchtitan_wlb.cost.step_time import Action, StageCosts, StepModel
from torchtitan_wlb.torch_private import ComputationType

LOOPED_SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # stage i on rank i mod PP
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")  # two stages a rank: r on the way down, 2 PP - 1 - r on the way up
SPLIT_SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ACTION_TYPES = {
    "F": ComputationType.FORWARD,
    "B": ComputationType.FULL_BACKWARD,
    "I": ComputationType.BACKWARD_INPUT,
    "W": ComputationType.BACKWARD_WEIGHT,
}
_KINDS = {type: kind for kind, type in ACTION_TYPES.items()}


def schedule_problem(schedule: str, pp: int, m: int) -> str:
    """Why a schedule refuses M micro-batches, "" if it accepts (the rules of torch.distributed.pipelining)."""
    if pp == 1:
        return ""
    flag = f"--parallelism.pipeline_parallel_degree {pp}"
    if schedule == "1F1B" and m < pp:
        return f"1F1B needs at least {pp} ({flag})"
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and (m < pp or m % max(1, m // pp)):
        return f"{schedule} needs M >= {pp} with M divisible by M // {pp} ({flag})"
    if schedule == "ZBVZeroBubble" and m < pp:
        return f"ZBVZeroBubble needs at least {pp} ({flag})"
    if schedule == "DualPipeV" and m < 2 * pp:
        return f"DualPipeV needs at least {2 * pp} ({flag})"
    return ""


def default_micro_batches(schedule: str, pp: int) -> int:
    """Micro-batches a data-parallel rank that fill a pipeline: PP, or what the schedule needs at least."""
    return 2 * pp if schedule == "DualPipeV" and pp > 1 else pp


def count_stages(schedule: str, pp: int, stages_per_rank: int) -> int:
    """Stages of the whole pipeline; without pipelining there is one, whatever the schedule."""
    if pp == 1:
        return 1
    return pp * (stages_per_rank if schedule in LOOPED_SCHEDULES else 2 if schedule in V_SCHEDULES else 1)


def schedule_actions(
    schedule: str, pp: int, m: int, stages_per_rank: int = 2, split: bool = True
) -> list[list[Action]]:
    """What every pipeline rank computes in which order: (kind, stage, micro-batch), see cost/step_time.py.

    Args:
        schedule: name of a torch.distributed.pipelining schedule.
        pp, m: pipeline ranks and micro-batches, legal for the schedule (schedule_problem).
        stages_per_rank: of the looped schedules.
        split: let the schedule split backward into I and W; else a whole backward stands in the place of I. Not to be
            used with activation checkpointing: torch computes W by one backward for every weight, and each would run
            the forward of the block again (a step took 2.3 times as long).
    """
    if schedule in ("GPipe", "1F1B") or pp == 1:
        return [_one_stage_actions(schedule, pp, rank, m) for rank in range(pp)]
    # A schedule writes down the lists of all ranks from the number of stages alone: no process group is needed.
    n_stages = count_stages(schedule, pp, stages_per_rank)
    stages: list[Any] = [
        SimpleNamespace(stage_index=i, num_stages=n_stages, group_size=pp, group_rank=0, submod=None)
        for i in range(n_stages // pp)
    ]
    order = cast(Any, get_schedule_class(schedule))(stages, n_microbatches=m, loss_fn=identity).pipeline_order
    actions = [list(_flatten(order[rank])) for rank in range(pp)]
    if split:
        return actions
    return [[("B" if kind == "I" else kind, s, i) for kind, s, i in each if kind != "W"] for each in actions]


def bubble(schedule: str, pp: int, m: int, stages_per_rank: int = 2) -> float:
    """How often the largest of M micro-batches counts again in a step (packing/objective.py): the time model's answer
    for equal micro-batches and stages. (PP - 1) / v with v stages a rank for 1F1B, GPipe and their looped kin."""
    actions = schedule_actions(schedule, pp, m, stages_per_rank)
    n_stages = count_stages(schedule, pp, stages_per_rank)
    even = (1 / n_stages,) * n_stages
    step = StepModel(actions, StageCosts(even, even)).predict(np.zeros(m), np.ones(m))
    return round(step.seconds * pp - m, 6)


def _one_stage_actions(schedule: str, pp: int, rank: int, m: int) -> list[Action]:
    """GPipe: all forwards first. 1F1B: as many as there are ranks from here on, then one backward for one forward."""
    ahead = m if schedule == "GPipe" and pp > 1 else min(m, pp - rank)
    actions: list[Action] = [("F", rank, i) for i in range(ahead)]
    for i in range(m):
        actions.append(("B", rank, i))
        if ahead + i < m:
            actions.append(("F", rank, ahead + i))
    return actions


def _flatten(actions) -> Iterator[Action]:
    for a in actions:
        if a is not None:
            # DualPipeV names pairs of forward and backward that a GPU may overlap; one after the other here.
            for part in a.sub_actions or (a,):
                yield _KINDS[part.computation_type], part.stage_index, part.microbatch_index


def identity(loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Loss function of a schedule: the last stage returns the scaled loss itself."""
    return loss

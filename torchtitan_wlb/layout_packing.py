"""What decides packing in a layout: micro-batches of a step, who waits for whom, what memory holds at once."""

from collections.abc import Iterator
from dataclasses import replace

from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.cost.memory import in_flight
from torchtitan_wlb.packing.objective import StepObjective
from torchtitan_wlb.packing.settings import PackingSettings, resolve_settings
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.schedules import bubble, default_micro_batches, schedule_actions, schedule_problem

SPLITS = (1, 2, 3, 4, 6, 8)  # micro-batches that training.micro_batch_tokens = "auto" tries in the place of one


def resolve_batch(config: JobConfig, dims: ParallelDims) -> int:
    """N, micro-batches a step over all ranks: training.global_batch_size with -1 resolved."""
    n = config.training.global_batch_size
    return dims.dp * default_micro_batches(config.parallelism.pipeline_parallel_schedule, dims.pp) if n == -1 else n


def reshards_parameters(config: JobConfig, dims: ParallelDims, n: int) -> bool:
    """parallelism.reshard_after_forward with default resolved, for n micro-batches a step."""
    chosen = config.parallelism.reshard_after_forward
    return chosen == "always" or (chosen == "default" and dims.pp == 1 and n == dims.dp)


def resolve_packing(
    config: JobConfig, dims: ParallelDims, cost: CostModel, seed: int | None = None
) -> Iterator[PackingSettings]:
    """The packing settings of a fresh run in this layout; several where training.micro_batch_tokens is "auto", one for
    every number of micro-batches that tuning.tune may choose.

    Args:
        cost: workload model to freeze. seed: of the order of the documents, debug.seed without.
    """
    p, schedule = config.parallelism, config.parallelism.pipeline_parallel_schedule
    n, has_limit = resolve_batch(config, dims), config.packing.max_tokens_in_flight > 0
    base = resolve_settings(
        config.training,
        config.packing,
        n=n,
        objective=StepObjective(1, 0.0),
        alive=micro_batches_alive(config, dims, n) if has_limit else 1,
        seed=config.debug.seed if seed is None else seed,
        cost=cost,
    )
    may_split = config.training.micro_batch_tokens == "auto" and config.packing.strategy.startswith("wlb")
    for s in [base, *(base.split(k) for k in SPLITS[1:] if may_split)]:
        if not any(batch_problems(s.n, dims, schedule)):
            idle = bubble(schedule, dims.pp, s.n // dims.dp, p.pipeline_parallel_stages_per_rank)
            # Parameters gathered, or gradients reduced, for every micro-batch make ranks wait in every one.
            in_each = reshards_parameters(config, dims, s.n) or p.reduce_every_micro_batch
            waits_in_each = dims.pp == 1 and dims.dp > 1 and in_each
            objective = StepObjective(s.n if waits_in_each else dims.dp, idle)
            alive = micro_batches_alive(config, dims, s.n) if has_limit else 0
            yield replace(s, objective=objective, in_flight=(alive, s.in_flight[1]))
        elif s is base:
            yield base  # check_batch says what is wrong with it


def micro_batches_alive(config: JobConfig, dims: ParallelDims, n: int) -> int:
    """Micro-batches whose activations a rank holds at once at most, for n micro-batches a step."""
    p = config.parallelism
    if dims.pp == 1 or any(batch_problems(n, dims, p.pipeline_parallel_schedule)):
        return dims.pp
    splits = config.activation_checkpoint.mode == "none"
    m, v = n // dims.dp, p.pipeline_parallel_stages_per_rank
    return in_flight(schedule_actions(p.pipeline_parallel_schedule, dims.pp, m, v, split=splits))


def batch_problems(n: int, dims: ParallelDims, schedule: str) -> Iterator[str]:
    """What speaks against N micro-batches a step in this layout."""
    if n % dims.dp:
        yield f"--training.global_batch_size {n}: must be a multiple of the {dims.dp} data-parallel ranks"
    elif reason := schedule_problem(schedule, dims.pp, n // dims.dp):
        yield f"--training.global_batch_size {n} gives {n // dims.dp} micro-batches a data-parallel rank: {reason}"

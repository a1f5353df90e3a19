"""What the ranks of a run will hold in memory (cost/memory.py), from its configuration and its pipeline."""

from collections.abc import Callable
from dataclasses import replace

import torch

from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.cost.memory import most_alive, rank_bytes
from torchtitan_wlb.cost.model_shape import ModelShape
from torchtitan_wlb.cost.step_time import stages_of
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.pipeline_llama import PipelinePlan


def estimate_memory(
    config: JobConfig,
    dims: ParallelDims,
    shape: ModelShape,
    plan: PipelinePlan,
    settings: PackingSettings,
    *,
    reshards: bool,
    largest: int = 0,
) -> dict[str, float]:
    """Bytes of the fullest rank, by what they are: one micro-batch of the largest size and average ones beside it, or
    packing.max_tokens_in_flight where that is set.

    Args:
        plan, settings: of the run. reshards: parameters between forward and backward.
        largest: tokens of the largest micro-batch, S_max without.
    """
    value_bytes = getattr(torch, config.training.mixed_precision_param).itemsize
    largest = largest or (settings.seq_len if settings.fixed_length else settings.s_max)
    mean = settings.seq_len if settings.fixed_length else settings.micro_batch_tokens
    found = []
    for rank in range(dims.pp):
        mine = stages_of(plan.actions[rank])
        alive = most_alive(plan.actions[rank]) / len(mine)
        tokens = min(alive, 1) * largest + max(0.0, alive - 1) * min(mean, largest)
        if settings.in_flight[0]:
            tokens = max(largest, settings.in_flight[1] * alive / settings.in_flight[0])
        found.append(
            rank_bytes(
                shape,
                layers=sum(len(plan.stages[i]) for i in mine),
                has_embedding=0 in mine,
                has_head=len(plan.stages) - 1 in mine,
                tp=dims.tp,
                fsdp=dims.dp_shard * dims.cp,
                value_bytes=value_bytes,
                ac=config.activation_checkpoint.kept,
                tokens_alive=tokens / dims.cp,
                largest=largest / dims.cp,
                received=0.0 if config.context_parallel.recompute_kv else received_at_most(dims.cp),
                keeps_gathered=not reshards,
                accumulates=settings.n > dims.dp and not config.parallelism.reduce_every_micro_batch,
                optimizer_bytes=8 if config.optimizer.name == "AdamW" else 4 * (config.optimizer.momentum > 0),
                loss_chunk=config.training.loss_chunk(shape.vocab_size // dims.tp),
            )
        )
    return max(found, key=lambda x: sum(x.values()))


def received_at_most(cp: int) -> float:
    """Tokens of K and V that a rank receives, a token of its own: all that precede its later half in one document that
    fills the micro-batch, on average over the ranks, less what it owns."""
    return max(0.0, 0.75 * cp - 1) if cp > 1 else 0.0


def in_words(parts: dict[str, float]) -> str:
    """One line: total, then the parts from the largest on."""
    shown = ", ".join(f"{name} {x / 1e9:.2f}" for name, x in sorted(parts.items(), key=lambda p: -p[1]) if x)
    return f"{sum(parts.values()) / 1e9:.2f} GB ({shown})"


def largest_that_fits(memory: float, estimate: Callable[..., dict[str, float]], settings: PackingSettings) -> int:
    """Tokens of the largest micro-batch with which the fullest rank stays within some bytes, 0 if none does.

    Args:
        estimate: estimate_memory for settings and a largest micro-batch.
    """
    unit = settings.seq_len_multiple
    low, high = 0, (1 << 24) // unit  # in units: low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        tokens = middle * unit
        limited = replace(settings, micro_batch_tokens=min(settings.micro_batch_tokens, tokens))
        fits = sum(estimate(limited, largest=tokens).values()) <= memory
        low, high = (middle, high) if fits else (low, middle)
    return low * unit

"""Which shard plan a micro-batch gets: the one whose slowest rank is predicted fastest (WLB-LLM §5.3). No torch.

The choice is a pure function of lengths, so all ranks agree without talking; it may differ between micro-batches and
never feeds back into packing.
"""

import numpy as np

from torchtitan_wlb.context_parallel.hybrid import hybrid, piece_cost
from torchtitan_wlb.context_parallel.shard_plan import ShardPlan, per_document, per_sequence, whole
from torchtitan_wlb.context_parallel.traffic import chunk_table, received_tokens
from torchtitan_wlb.cost.kernel_cost import KernelCost

KINDS = ("per_sequence", "per_document", "hybrid")


def build_plan(kind: str, lengths: list[int], n_tokens: int, cp: int, kernel: KernelCost) -> ShardPlan:
    """The shard plan of a kind; see its builder."""
    if kind == "hybrid":
        return hybrid(lengths, n_tokens, cp, kernel)
    return (per_document if kind == "per_document" else per_sequence)(lengths, n_tokens, cp)


def attention_seconds(plan: ShardPlan, kernel: KernelCost) -> np.ndarray:
    """Predicted seconds of one attention layer on every rank, without the exchange, [CP]."""
    table, _ = chunk_table(plan)
    return np.bincount(table[:, 3], kernel.seconds(table[:, 2] - table[:, 1], table[:, 2]), plan.cp)


def latency(plan: ShardPlan, kernel: KernelCost) -> float:
    """Predicted seconds of the slowest rank: its attention and its K/V exchange, forward and backward."""
    received = received_tokens(plan)
    slowest = float((attention_seconds(plan, kernel) + received * kernel.token_seconds).max())
    return slowest + kernel.latency * bool(received.any())


def choose_plan(lengths: list[int], n_tokens: int, cp: int, sharding: str, kernel: KernelCost) -> ShardPlan:
    """Build the shard plan of a micro-batch.

    Args:
        lengths: tokens of the documents.
        n_tokens: T, a multiple of 2 CP.
        sharding: a kind, or "adaptive" for the smallest predicted latency over the three (ties: the last of them).
        kernel: predicted cost of chunks.
    """
    if cp == 1:
        return whole(lengths, n_tokens)
    if sharding != "adaptive":
        return build_plan(sharding, lengths, n_tokens, cp, kernel)
    best = build_plan("hybrid", lengths, n_tokens, cp, kernel)
    seconds = latency(best, kernel)
    # Cutting every document costs every rank at least one piece of each; often that alone says no.
    if lengths and piece_cost(np.asarray(lengths), cp, kernel).sum() < seconds:
        plan = build_plan("per_document", lengths, n_tokens, cp, kernel)
        best, seconds = min((best, seconds), (plan, latency(plan, kernel)), key=lambda x: x[1])
    plan = build_plan("per_sequence", lengths, n_tokens, cp, kernel)
    return min((best, seconds), (plan, latency(plan, kernel)), key=lambda x: x[1])[0]

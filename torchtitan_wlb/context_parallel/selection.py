"""Which shard plan a micro-batch gets: the one whose slowest rank is predicted fastest (WLB-LLM §5.3). No torch.

The choice is a pure function of lengths, so all ranks agree without talking; it may differ between micro-batches and
never feeds back into packing.
"""

import numpy as np

from torchtitan_wlb.context_parallel.shard_plan import BUILDERS, ShardPlan, whole


def attention_cost(plan: ShardPlan, tile: int) -> np.ndarray:
    """Predicted attention work of every rank in (query, key) pairs, queries padded to the tile, [CP]."""
    out = []
    for rank in range(plan.cp):
        s = plan.segments(rank)
        q, k = s[:, 1] - s[:, 0], s[:, 3] - s[:, 2]
        padded = -(-q // tile) * tile
        # Queries of a chunk see k - q .. k keys: on average k - q / 2. Padded rows are computed like the others.
        out.append((padded * (k - (q - 1) / 2)).sum())
    return np.array(out)


def choose_plan(lengths: list[int], n_tokens: int, cp: int, sharding: str, tile: int) -> ShardPlan:
    """Build the shard plan of a micro-batch.

    Args:
        lengths: tokens of the documents.
        n_tokens: T, a multiple of 2 CP.
        sharding: a builder's name, or "adaptive" for the smallest predicted maximum over ranks (ties: per_document).
        tile: queries of a kernel tile; a shorter chunk costs a whole one (WLB-LLM §5.2).
    """
    if cp == 1:
        return whole(lengths, n_tokens)
    if sharding != "adaptive":
        return BUILDERS[sharding](lengths, n_tokens, cp)
    plans = [build(lengths, n_tokens, cp) for build in (BUILDERS["per_document"], BUILDERS["per_sequence"])]
    return min(plans, key=lambda plan: attention_cost(plan, tile).max())

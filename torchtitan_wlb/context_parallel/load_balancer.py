"""Shard plans for code that uses torch's own context parallelism (torchtitan's way): one line more.

from torch.distributed.tensor.experimental._attention import _context_parallel_shard

plan = choose_plan(lengths, n_tokens, cp, "adaptive", kernel_cost)
tokens, positions = _context_parallel_shard(mesh, [tokens, positions], [1, 1], PlanLoadBalancer(plan, device))
"""

import numpy as np
import torch

from torchtitan_wlb.context_parallel.shard_plan import ShardPlan
from torchtitan_wlb.torch_private import LoadBalancer


class PlanLoadBalancer(LoadBalancer):
    """Rearranges a packed sequence so that cutting it into CP equal parts gives every rank the tokens of a shard plan.

    Args:
        plan: any kind.
        device: where the indices are needed.
    """

    def __init__(self, plan: ShardPlan, device: str | torch.device = "cpu"):
        packed = np.concatenate([plan.token_index(rank) for rank in range(plan.cp)])
        self._indices = torch.from_numpy(packed).to(device)

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        """[1, T] packed position of every rearranged token; with restore the inverse."""
        return (self._indices.argsort() if restore else self._indices)[None]

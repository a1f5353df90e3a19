"""Attention of a context-parallel rank: gather K/V, attend, scatter the gradients back (all-gather CP, WLB-LLM §5).

q, k, v [1, T/CP, H/TP, D] ─► K and V in one all-gather ─► packed order [T, Hkv/TP, D] ─► segments ─► like q
backward: dK, dV [T, Hkv/TP, D] ─► gathered order ─► one reduce-scatter ─► like k, v
"""

import torch
import torch.distributed as dist

from torchtitan_wlb.data.micro_batch import AttentionMeta
from torchtitan_wlb.models.attention import Attention
from torchtitan_wlb.parallelisms.distributed import all_gather, reduce_scatter


class _GatherPacked(torch.autograd.Function):
    """[2, T/CP, H, D] of this rank -> [2, T, H, D] of all ranks in packed order; the backward sums what every rank
    contributes."""

    @staticmethod
    def forward(ctx, kv, index, group):
        ctx.index, ctx.group = index, group
        cp = dist.get_world_size(group)
        gathered = kv.new_empty(cp * 2, *kv.shape[1:])
        all_gather(gathered, kv.contiguous(), group=group)
        # [CP, 2, T/CP, ...] -> [2, CP x T/CP, ...] -> packed order
        return gathered.unflatten(0, (cp, 2)).transpose(0, 1).flatten(1, 2).index_select(1, index)

    @staticmethod
    def backward(ctx, grad):
        cp = dist.get_world_size(ctx.group)
        by_rank = torch.empty_like(grad)
        by_rank[:, ctx.index] = grad  # the index is a permutation
        by_rank = by_rank.unflatten(1, (cp, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        mine = torch.empty_like(by_rank[:2])
        reduce_scatter(mine, by_rank, group=ctx.group)
        return mine, None, None


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: AttentionMeta,
    kernel: Attention,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Causal attention inside documents over the shards of all context-parallel ranks.

    Args:
        q: [1, T/CP, Hq/TP, D]. k, v: [1, T/CP, Hkv/TP, D].
        meta: segments of this rank and the packed order.
        kernel: see models/attention.py.
        group: context-parallel ranks, None for one.

    Returns:
        [1, T/CP, Hq/TP, D]; zero on padding.
    """
    kv = torch.cat([k, v])
    if group is not None:
        kv = _GatherPacked.apply(kv, meta.gathered_index, group)
    return kernel(q[0], kv[0], kv[1], meta.segments)[None]

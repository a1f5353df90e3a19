"""What one context-parallel rank sends, receives and attends to for a shard plan, as the tensors of a ShardMeta.

my K/V shard [T/CP] ──► send_index, send_splits ──► one all-to-all ──► received, recv_splits
keys of my later chunks, chunk by chunk = (my shard, received)[key_source]
"""

from dataclasses import dataclass

import numpy as np
import torch

from torchtitan_wlb.context_parallel.shard_plan import ShardPlan, ranges
from torchtitan_wlb.context_parallel.traffic import chunk_table
from torchtitan_wlb.models.attention import AttentionMeta
from torchtitan_wlb.models.kernels import Segments, cumulative

_LEAST = 2  # torch.compile makes graphs of their own for tensors of 0 and of 1 elements


@dataclass
class ShardMeta(AttentionMeta):
    """Who attends to what on one context-parallel rank: `Shard` written as tensors.

    Attributes:
        room: int8 [received tokens] on the host; only its length counts, which a compiled graph can know from a shape
            alone.
    """

    room: torch.Tensor


@dataclass(frozen=True)
class Shard:
    """What a ShardMeta says.

    Attributes:
        local, later: segments of the chunks that begin their document (keys in the shard), and of the others.
        n_local, n_later: their tokens.
        travels: whether any rank needs keys of another.
        send_index: int32 [sent] local positions to send, by destination; send_splits: how many to each of the CP ranks.
        recv_splits: tokens received from each.
        key_source: int32 [keys of later] where each is: in the shard, or T/CP + among the received.
    """

    local: Segments
    n_local: int
    later: Segments
    n_later: int
    travels: bool
    send_index: torch.Tensor
    key_source: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]

    @staticmethod
    def read(index: torch.Tensor, sizes: torch.Tensor) -> "Shard":
        n, n_local, longest, m, n_later, longest_q, longest_k, travels, *splits = sizes.tolist()
        cp = len(splits) // 2
        sent = sum(splits[:cp])
        cu, cu_q, cu_k, send, keys = index.split([n + 1, m + 1, m + 1, sent, len(index) - n - 2 * m - sent - 3])
        return Shard(
            local=Segments(cu, cu, longest, longest),
            n_local=n_local,
            later=Segments(cu_q, cu_k, longest_q, longest_k),
            n_later=n_later,
            travels=bool(travels),
            send_index=send,
            key_source=keys,
            send_splits=splits[:cp],
            recv_splits=splits[cp:],
        )


def shard_meta(plan: ShardPlan, rank: int) -> ShardMeta:
    """Metadata of a rank. All ranks number what they send and receive by (source, position in the source's shard)."""
    cp = plan.cp
    table, need = chunk_table(plan)
    doc, start, stop, owner, first = table.T

    def taken_by(r: int) -> np.ndarray:
        """Tokens of every chunk among the keys of rank r's later chunks."""
        return np.maximum(0, np.minimum(stop, need[doc, r]) - start)

    mine = owner == rank
    local, later = mine & (start == 0), mine & (start > 0)
    sends = [np.where(mine & (owner != r), taken_by(r), 0) for r in range(cp)]
    wanted = taken_by(rank)
    received = np.where(mine, 0, wanted)
    # Where the keys of every document are, document by document from the first on; then for every later chunk its own.
    place = np.where(mine, first, plan.n_tokens // cp + np.cumsum(received) - received)
    by_document = np.lexsort((start, doc))
    keys = ranges(place[by_document], wanted[by_document])
    base = np.cumsum(need[:, rank]) - need[:, rank]
    sizes = [
        *(local.sum(), stop[local].sum(), stop[local].max(initial=0)),
        *(later.sum(), (stop - start)[later].sum(), (stop - start)[later].max(initial=0), stop[later].max(initial=0)),
        need.any(),
        *(s.sum() for s in sends),
        *np.bincount(owner, received, cp),
    ]
    index = [
        *(cumulative(stop[local]), cumulative((stop - start)[later]), cumulative(stop[later])),
        *(ranges(first[s > 0], s[s > 0]) for s in sends),
        keys[ranges(base[doc[later]], stop[later])],
    ]
    return ShardMeta(
        index=torch.from_numpy(np.concatenate(index).astype(np.int32)),
        sizes=torch.tensor([int(x) for x in sizes]),
        room=torch.zeros(max(_LEAST, int(received.sum())), dtype=torch.int8),
    )

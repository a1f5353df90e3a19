"""What one context-parallel rank sends, receives and attends to for a shard plan.

my K/V shard [T/CP] ──► send_index, send_splits ──► one all-to-all ──► received, recv_splits
remote keys [R]: for every document with a later chunk here its keys [0, need), document by document
                 own_position <- my shard[own_index], recv_position <- received
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchtitan_wlb.context_parallel.shard_plan import ShardPlan, ranges
from torchtitan_wlb.context_parallel.traffic import chunk_table
from torchtitan_wlb.models.attention import AttentionMeta
from torchtitan_wlb.models.kernels import Segments


@dataclass(frozen=True)
class Exchange:
    """The K/V exchange of one rank; index tensors are int64.

    Attributes:
        segments: (q_start, q_stop, k_start, k_stop) with keys among the remote keys.
        n_remote: R.
        send_index: [sent] local positions to send, by destination; send_splits: how many to each of the CP ranks.
        recv_splits: tokens received from each; recv_position: [received] their places among the remote keys.
        own_index, own_position: local positions that are remote keys too, and their places.
    """

    segments: Segments
    n_remote: int
    send_index: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]
    recv_position: torch.Tensor
    own_index: torch.Tensor
    own_position: torch.Tensor

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Exchange":
        moved: Any = {k: move(x) for k, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **moved)


@dataclass
class ShardMeta(AttentionMeta):
    """Who attends to what on one context-parallel rank.

    Attributes:
        segments: those with keys in the local shard, n_padding: at its end.
        exchange: None if nothing travels, on any rank.
    """

    exchange: Exchange | None = None

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "ShardMeta":
        """With every tensor moved (to a device, to pinned memory)."""
        return self if self.exchange is None else replace(self, exchange=self.exchange.map(move))


def shard_meta(plan: ShardPlan, rank: int) -> ShardMeta:
    """Metadata of a rank. All ranks number what they send and receive by (source, position in the source's shard)."""
    cp = plan.cp
    table, need = chunk_table(plan)
    doc, start, stop, owner, first = table.T

    mine = owner == rank
    segments = np.column_stack([first, first + stop - start, first, first + stop - start])[mine]
    is_local = start[mine] == 0
    padding = plan.chunks[rank][plan.chunks[rank][:, 0] == len(plan.lengths)]
    local = ShardMeta(_rows(segments[is_local]), int((padding[:, 2] - padding[:, 1]).sum()))
    if not need.any():
        return local

    base = np.cumsum(need[:, rank]) - need[:, rank]
    remote = segments[~is_local]
    remote[:, 2], remote[:, 3] = base[doc[mine][~is_local]], base[doc[mine][~is_local]] + stop[mine][~is_local]

    def taken_by(r) -> np.ndarray:
        """Tokens of every chunk among the remote keys of rank r."""
        return np.maximum(0, np.minimum(stop, need[doc, r]) - start)

    received = taken_by(rank)
    others = (owner != rank) & (received > 0)
    own = mine & (received > 0)
    sends = [np.where(mine & (owner != r), taken_by(r), 0) for r in range(cp)]
    exchange = Exchange(
        segments=_rows(remote),
        n_remote=int(need[:, rank].sum()),
        send_index=torch.from_numpy(np.concatenate([ranges(first[s > 0], s[s > 0]) for s in sends])),
        send_splits=[int(s.sum()) for s in sends],
        recv_splits=np.bincount(owner[others], received[others], cp).astype(np.int64).tolist(),
        recv_position=torch.from_numpy(ranges(base[doc[others]] + start[others], received[others])),
        own_index=torch.from_numpy(ranges(first[own], received[own])),
        own_position=torch.from_numpy(ranges(base[doc[own]] + start[own], received[own])),
    )
    return replace(local, exchange=exchange)


def _rows(segments: np.ndarray) -> Segments:
    return [tuple(s) for s in segments.tolist()]

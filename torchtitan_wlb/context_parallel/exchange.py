"""Which keys and values travel between context-parallel ranks for a shard plan. Arrays of ints, no torch.

A chunk that begins its document needs no keys but its own: it is *local*. A later chunk [a, b) needs the keys [0, b) of
the document: those of other ranks travel, once for all chunks that need them. Documents that one rank owns whole never
travel.

    my K/V shard [T/CP] ──► send_index, send_splits ──► one all-to-all ──► received, recv_splits
    remote keys [R]: for every document with a later chunk here its keys [0, need), document by document
                     own_position <- my shard[own_index], recv_position <- received
"""

from dataclasses import dataclass

import numpy as np

from torchtitan_wlb.context_parallel.shard_plan import ShardPlan, ranges


@dataclass(frozen=True)
class Exchange:
    """The part of one rank.

    Attributes:
        local: segments (q_start, q_stop, k_start, k_stop) with keys in the local shard.
        remote: segments with keys in the remote keys.
        send_index: [sent] local positions to send, by destination; send_splits: [CP] how many to each.
        recv_splits: [CP] tokens received from each; recv_position: [received] their places among the remote keys.
        own_index, own_position: local positions that are remote keys too, and their places.
        n_remote: R.
    """

    local: np.ndarray
    remote: np.ndarray
    send_index: np.ndarray
    send_splits: np.ndarray
    recv_splits: np.ndarray
    recv_position: np.ndarray
    own_index: np.ndarray
    own_position: np.ndarray
    n_remote: int


def chunk_table(plan: ShardPlan) -> tuple[np.ndarray, np.ndarray]:
    """(real chunks of all ranks [n, 5]: document, start, stop, owner, first local position; need [documents, CP]).

    need[doc, r]: keys [0, need) of the document that its later chunks on rank r attend to.
    """
    table = np.concatenate(plan.chunks)
    owner = np.repeat(np.arange(plan.cp), [len(c) for c in plan.chunks])
    size = table[:, 2] - table[:, 1]
    first = np.cumsum(size) - size - owner * (plan.n_tokens // plan.cp)
    table = np.column_stack([table, owner, first])[table[:, 0] < len(plan.lengths)]
    need = np.zeros((len(plan.lengths), plan.cp), dtype=np.int64)
    later = table[table[:, 1] > 0]
    np.maximum.at(need, (later[:, 0], later[:, 3]), later[:, 2])
    return table, need


def received_tokens(plan: ShardPlan) -> np.ndarray:
    """Tokens that every rank receives, [CP]: what it needs and does not own."""
    table, need = chunk_table(plan)
    taken = np.maximum(0, np.minimum(table[:, 2:3], need[table[:, 0]]) - table[:, 1:2])
    taken[np.arange(len(table)), table[:, 3]] = 0
    return taken.sum(axis=0)


def plan_exchange(plan: ShardPlan, rank: int) -> Exchange:
    """Index lists of a rank. All ranks number what they send and receive by (source, position in the source's
    shard)."""
    cp = plan.cp
    table, need = chunk_table(plan)
    doc, start, stop, owner, first = table.T
    later = start > 0

    mine = owner == rank
    segments = np.column_stack([first, first + stop - start, first, first + stop - start])[mine]
    is_local = ~later[mine]
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
    return Exchange(
        local=segments[is_local],
        remote=remote,
        send_index=np.concatenate([ranges(first[s > 0], s[s > 0]) for s in sends]),
        send_splits=np.array([s.sum() for s in sends]),
        recv_splits=np.bincount(owner[others], received[others], cp).astype(np.int64),
        recv_position=ranges(base[doc[others]] + start[others], received[others]),
        own_index=ranges(first[own], received[own]),
        own_position=ranges(base[doc[own]] + start[own], received[own]),
        n_remote=int(need[:, rank].sum()),
    )

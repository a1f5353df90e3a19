"""Which keys a shard plan makes travel between context-parallel ranks. Arrays of ints, no torch.

A chunk that begins its document needs no keys but its own: it is *local*. A later chunk [a, b) needs the keys [0, b) of
the document: those of other ranks travel, once for all chunks that need them. Documents that one rank owns whole never
travel.
"""

import numpy as np

from torchtitan_wlb.context_parallel.shard_plan import ShardPlan


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

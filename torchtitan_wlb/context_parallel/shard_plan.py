"""Which context-parallel rank owns which tokens of a micro-batch. Arrays of ints, no torch.

A micro-batch of T tokens is documents laid end to end, then a padding tail. A *chunk* (document, start, stop) is a run
of tokens of one document on one rank; a *shard plan* gives every rank its ordered chunks so that every rank has exactly
T / CP tokens and every token exactly one owner. The attention knows only the plan, never how it was built.

    lengths [4, 12], CP = 2, per_document:         per_sequence (chunks of T / 4 tokens, rank i takes i and 3 - i):
      rank 0   A[0:1] A[3:4]   B[0:3] B[9:12]        A[0:4]   B[8:12]
      rank 1   A[1:3]          B[3:9]                B[0:4]   B[4:8]

The padding tail is document number len(lengths): it is dealt like tokens, and attention skips it.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


def pairs(start, stop):
    """Attended (query, key) pairs of queries [start, stop) of a document under a causal mask (ints or arrays)."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


@dataclass(frozen=True)
class ShardPlan:
    """Owner of every token of one micro-batch.

    Attributes:
        kind: name of the builder.
        lengths: tokens of the documents, in packed order.
        n_tokens: T, padding tail included.
        chunks: for every rank its chunks in local order, int64 [n, 3] of (document, start, stop).
    """

    kind: str
    lengths: tuple[int, ...]
    n_tokens: int
    chunks: tuple[np.ndarray, ...]

    @property
    def cp(self) -> int:
        return len(self.chunks)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Packed position of the first token of every document, and of the padding tail: [documents + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def token_index(self, rank: int) -> np.ndarray:
        """Packed positions of a rank's tokens in local order, [T/CP]."""
        c = self.chunks[rank]
        return ranges(self.offsets[c[:, 0]] + c[:, 1], c[:, 2] - c[:, 1])

    def segments(self, rank: int) -> np.ndarray:
        """Attention of a rank: [n, 4] of (q_start, q_stop) in local order, (k_start, k_stop) in packed order. The last
        query of a segment attends to its last key (bottom-right causal). Padding has no segment."""
        c = self.chunks[rank]
        q_stop = np.cumsum(c[:, 2] - c[:, 1])
        q_start = q_stop - (c[:, 2] - c[:, 1])
        first = self.offsets[c[:, 0]]
        return np.column_stack([q_start, q_stop, first, first + c[:, 2]])[c[:, 0] < len(self.lengths)]

    def travels(self) -> bool:
        """Whether some chunk needs keys of another rank: one that does not begin its document."""
        return any((c[c[:, 0] < len(self.lengths), 1] > 0).any() for c in self.chunks)

    def attended_pairs(self) -> np.ndarray:
        """Attended pairs of every rank, [CP]."""
        out = []
        for c in self.chunks:
            c = c[c[:, 0] < len(self.lengths)]
            out.append(pairs(c[:, 1], c[:, 2]).sum())
        return np.array(out, dtype=np.int64)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenation of arange(start, start + length)."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)


def merge_chunks(chunks: list[tuple[int, int, int]]) -> np.ndarray:
    """Chunks as an array, empty ones left out and neighbours of one document joined."""
    out: list[list[int]] = []
    for doc, start, stop in chunks:
        if start == stop:
            continue
        if out and out[-1][0] == doc and out[-1][2] == start:
            out[-1][2] = stop
        else:
            out.append([doc, start, stop])
    return np.array(out, dtype=np.int64).reshape(-1, 3)


def per_sequence(lengths: list[int], n_tokens: int, cp: int) -> ShardPlan:
    """Cut the packed sequence into 2 CP equal pieces; rank i takes pieces i and 2 CP - 1 - i (the paper's Plain-4D).

    Args:
        lengths: tokens of the documents.
        n_tokens: T >= sum(lengths), a multiple of 2 CP.
        cp: context-parallel degree.
    """
    sizes = [*lengths, n_tokens - sum(lengths)]
    piece = n_tokens // (2 * cp)
    assert piece * 2 * cp == n_tokens and sizes[-1] >= 0
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    chunks = []
    for i in range(cp):
        mine: list[tuple[int, int, int]] = []
        for p in (i, 2 * cp - 1 - i):
            a, b = p * piece, (p + 1) * piece
            for doc in range(int(np.searchsorted(offsets, a, side="right")) - 1, len(sizes)):
                if offsets[doc] >= b:
                    break
                start, stop = max(a, offsets[doc]), min(b, offsets[doc + 1])
                mine.append((doc, int(start - offsets[doc]), int(stop - offsets[doc])))
        chunks.append(merge_chunks(mine))
    return ShardPlan("per_sequence", tuple(lengths), n_tokens, tuple(chunks))


def per_document(lengths: list[int], n_tokens: int, cp: int) -> ShardPlan:
    """Cut every document into 2 CP chunks, early with late ones paired, so that ranks do equal work (WLB-LLM §5.1).

    The paper deals the d mod 2 CP left-over tokens of a document one by one. Here they make chunks one token longer
    instead: the same balance without chunks of one token, each of which would cost a kernel a whole tile. For one
    document of n = 2 CP chunks, q = d // n:

    1. pair k = chunks (k, n - 1 - k). Of the r = d mod n left-over tokens, r >= CP gives every early chunk one, and the
       other r mod CP go to the latest chunks: pairs 0 .. r mod CP - 1 are one token longer than the rest.
    2. Longest documents first, the longer pairs go to the ranks that have got fewest extra tokens so far (so real
       tokens differ by at most one), among those to the least loaded; within both groups the heavier pair goes to the
       less loaded rank.
    3. Padding fills every rank to T / CP.

    Balance: only left-over tokens make a difference. One costs at most 1.5 d pairs, and the differences do not add up,
    because the less loaded rank takes the heavier pair: max - mean stays below 2 x the longest document in pairs (1.4 x
    is the worst seen in random search), while a rank's work is about the sum of d² / (2 CP).

    Args:
        lengths: tokens of the documents.
        n_tokens: T >= sum(lengths), a multiple of CP.
        cp: context-parallel degree.
    """
    n = 2 * cp
    extra, work = [0] * cp, [0] * cp
    mine: list[list[tuple[int, int, int]]] = [[] for _ in range(cp)]
    for doc in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        q, r = divmod(lengths[doc], n)
        longer = r % cp
        bounds = [0]
        for c in range(n):
            bounds.append(bounds[-1] + q + (c < cp if r >= cp else 0) + (c >= n - longer))
        load = [pairs(bounds[k], bounds[k + 1]) + pairs(bounds[n - 1 - k], bounds[n - k]) for k in range(cp)]
        by_extra = sorted(range(cp), key=lambda i: (extra[i], work[i]))
        for ranks, slots in ((by_extra[:longer], range(longer)), (by_extra[longer:], range(longer, cp))):
            for rank, k in zip(sorted(ranks, key=work.__getitem__), sorted(slots, key=load.__getitem__, reverse=True)):
                mine[rank] += [(doc, bounds[k], bounds[k + 1]), (doc, bounds[n - 1 - k], bounds[n - k])]
                work[rank] += load[k]
                extra[rank] += k < longer
    chunks, padding = [], 0
    for rank in range(cp):
        own = sorted(mine[rank])  # packed order: neighbours of one document join, and reads run forward
        fill = n_tokens // cp - sum(stop - start for _, start, stop in own)
        chunks.append(merge_chunks([*own, (len(lengths), padding, padding + fill)]))
        padding += fill
    assert padding == n_tokens - sum(lengths)
    return ShardPlan("per_document", tuple(lengths), n_tokens, tuple(chunks))


def whole(lengths: list[int], n_tokens: int) -> ShardPlan:
    """The plan of one rank: everything in packed order."""
    sizes = [*lengths, n_tokens - sum(lengths)]
    return ShardPlan("whole", tuple(lengths), n_tokens, (merge_chunks([(i, 0, d) for i, d in enumerate(sizes)]),))

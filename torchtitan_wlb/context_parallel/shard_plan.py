"""Which context-parallel rank owns which tokens of a micro-batch. Arrays of ints, no torch.

A micro-batch of T tokens is documents laid end to end, then a padding tail. A *chunk* (document, start, stop) is a run
of tokens of one document on one rank; a *shard plan* gives every rank its ordered chunks so that every rank has exactly
T / CP tokens and every token exactly one owner. The attention knows only the plan, never how it was built.

    lengths [4, 12], CP = 2, per_document:         per_sequence (chunks of T / 4 tokens, rank i takes i and 3 - i):
      rank 0   A[0:1] B[0:3] | A[3:4] B[9:12]        A[0:4] | B[8:12]
      rank 1                 | A[1:3] B[3:9]         B[0:8] |

A rank holds first the chunks that begin their document (*local*: they attend to nothing but themselves), then the later
ones, which need keys of other ranks, then padding; so each of the three is a slice. The padding tail is document number
len(lengths): it is dealt like tokens, and attention skips it.
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
        chunks: for every rank its chunks in local order (local, later, padding), int64 [n, 3] of (document, start,
            stop).
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

    def segments(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Attention of a rank, one segment a real chunk in local order: (queries of each [n], keys of each [n], packed
        positions of all keys, segment by segment). The last query of a segment attends to its last key."""
        c = self.chunks[rank]
        c = c[c[:, 0] < len(self.lengths)]
        return c[:, 2] - c[:, 1], c[:, 2], ranges(self.offsets[c[:, 0]], c[:, 2])

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


def assemble(kind: str, lengths: list[int], n_tokens: int, cp: int, rank: np.ndarray, chunks: np.ndarray) -> ShardPlan:
    """A plan from unordered chunks of real documents: empty ones dropped, neighbours of one document on one rank
    joined, local ones before later ones, else in packed order, every rank filled up with padding.

    Args:
        rank: [n] owner of every chunk. chunks: [n, 3] (document, start, stop).
    """
    size = np.bincount(rank, chunks[:, 2] - chunks[:, 1], cp).astype(np.int64)
    fill = n_tokens // cp - size
    assert (fill >= 0).all() and fill.sum() == n_tokens - sum(lengths), "every rank holds T / CP tokens"
    pad_stop = np.cumsum(fill)
    padding = np.column_stack([np.full(cp, len(lengths)), pad_stop - fill, pad_stop])
    rank, chunks = np.concatenate([rank, np.arange(cp)]), np.concatenate([chunks, padding])
    filled = chunks[:, 2] > chunks[:, 1]
    rank, chunks = rank[filled], chunks[filled]
    order = np.lexsort((chunks[:, 1], chunks[:, 0], rank))
    rank, chunks = rank[order], chunks[order]
    joins = (rank[1:] == rank[:-1]) & (chunks[1:, 0] == chunks[:-1, 0]) & (chunks[1:, 1] == chunks[:-1, 2])
    first, last = np.append(True, ~joins), np.append(~joins, True)
    rank, merged = rank[first], chunks[first]
    merged[:, 2] = chunks[last, 2]
    later = np.where(merged[:, 0] == len(lengths), 2, merged[:, 1] > 0)
    order = np.lexsort((later, rank))  # stable
    per_rank = np.split(merged[order], np.searchsorted(rank, np.arange(1, cp)))
    return ShardPlan(kind, tuple(lengths), n_tokens, tuple(per_rank))


def per_sequence(lengths: list[int], n_tokens: int, cp: int) -> ShardPlan:
    """Cut the packed sequence into 2 CP equal pieces; rank i takes pieces i and 2 CP - 1 - i (the paper's Plain-4D).

    Args:
        lengths: tokens of the documents.
        n_tokens: T >= sum(lengths), a multiple of 2 CP.
        cp: context-parallel degree.
    """
    piece = n_tokens // (2 * cp)
    assert piece * 2 * cp == n_tokens >= sum(lengths)
    stop = np.cumsum(lengths, dtype=np.int64)
    total = int(stop[-1]) if len(lengths) else 0
    cuts = np.unique(np.concatenate([[0], stop, np.arange(0, total, piece)]))
    first, last = cuts[:-1], cuts[1:]
    document = np.searchsorted(stop, first, side="right")
    begin = (stop - lengths)[document] if len(lengths) else first
    p = first // piece
    chunks = np.column_stack([document, first - begin, last - begin])
    return assemble("per_sequence", lengths, n_tokens, cp, np.minimum(p, 2 * cp - 1 - p), chunks)


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
    d = np.asarray(lengths, dtype=np.int64)
    q, left = np.divmod(d, n)
    longer = left % cp
    c = np.arange(n)
    sizes = q[:, None] + ((c < cp) & (left >= cp)[:, None]) + (c >= n - longer[:, None])
    bounds = np.concatenate([np.zeros((len(d), 1), dtype=np.int64), np.cumsum(sizes, axis=1)], axis=1)
    work_of_chunk = pairs(bounds[:, :-1], bounds[:, 1:])
    load = work_of_chunk[:, :cp] + work_of_chunk[:, : cp - 1 : -1]
    # Slots by falling load, the longer ones before the others.
    slots = np.lexsort((-load, np.arange(cp) >= longer[:, None]))
    extra, work = np.zeros(cp, dtype=np.int64), np.zeros(cp, dtype=np.int64)
    owner = np.empty((len(d), cp), dtype=np.int64)
    for doc in np.argsort(-d, kind="stable").tolist():
        by_extra = np.lexsort((work, extra)) if longer[doc] else work.argsort(kind="stable")
        k = int(longer[doc])
        takers, others = by_extra[:k], by_extra[k:]
        ranks = np.concatenate([takers[work[takers].argsort()], others[work[others].argsort()]]) if k else others
        owner[doc, slots[doc]] = ranks
        work[ranks] += load[doc, slots[doc]]
        extra[takers] += 1
    document = np.repeat(np.arange(len(d)), n)
    chunks = np.column_stack([document, bounds[:, :-1].ravel(), bounds[:, 1:].ravel()])
    rank = np.concatenate([owner, owner[:, ::-1]], axis=1).ravel()
    return assemble("per_document", lengths, n_tokens, cp, rank, chunks)


def whole(lengths: list[int], n_tokens: int) -> ShardPlan:
    """The plan of one rank: everything in packed order."""
    chunks = np.column_stack([np.arange(len(lengths)), np.zeros_like(lengths), np.asarray(lengths, dtype=np.int64)])
    return assemble("whole", lengths, n_tokens, 1, np.zeros(len(lengths), dtype=np.int64), chunks.astype(np.int64))

"""Shard plan that cuts only what must be cut: long documents over as many ranks as they need, the others whole.

WLB-LLM leaves the mix inside one micro-batch open (§8). Cutting makes chunks short, which kernels dislike, and its K/V
travel; keeping documents whole makes ranks unequal. So:

1. A document is cut over r = 1, 2, 4 ... CP ranks, into 2 r chunks, early ones paired with late ones: r pieces of equal
   work. r is the least number for which a piece costs at most `grain` times the mean work of a rank.
2. Pieces are placed one by one on the rank with least work that has room for their tokens, the hardest to place first.
   Every rank must end with T / CP tokens, so tokens that cost no more than those of short documents make no difference
   between ranks: what counts for "least" and "hardest" is the work beyond that, cost - base x tokens.
3. A document that finds no room in its pieces is cut where a rank is full: equal token counts demand it. Padding fills
   the rest.
4. Several grains are tried: the plan with the smallest predicted maximum over ranks wins.
"""

import heapq

import numpy as np

from torchtitan_wlb.context_parallel.shard_plan import ShardPlan, assemble, pairs
from torchtitan_wlb.cost.kernel_cost import KernelCost

_GRAINS = (2.0, 1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03, 0.0)
_GOOD_ENOUGH = 0.002  # a finer grain is not tried if even perfect balance would gain less than this share

Chunk = tuple[int, int, int]


def hybrid(lengths: list[int], n_tokens: int, cp: int, kernel: KernelCost) -> ShardPlan:
    """Build the plan described above.

    Args:
        lengths: tokens of the documents.
        n_tokens: T >= sum(lengths), a multiple of CP.
        cp: context-parallel degree, a power of two for cuts over part of the ranks (others cut over 1 or all).
        kernel: predicted cost of chunks.
    """
    degrees = [r for r in (2**i for i in range(10)) if r < cp and cp % r == 0] + [cp]
    d = np.asarray(lengths, dtype=np.int64)
    cost = np.stack([piece_cost(d, r, kernel) for r in degrees], axis=1) if len(d) else np.zeros((0, len(degrees)))
    total = float(cost[:, 0].sum())
    base = _base_cost(d, cost[:, 0])
    best: tuple[float, list[list[Chunk]]] | None = None
    tried = set()
    for grain in _GRAINS:
        # The least degree whose pieces are fine enough; a document too short for its chunks stays coarser.
        fine = cost <= grain * total / cp
        level = np.where(fine.any(axis=1), fine.argmax(axis=1), len(degrees) - 1)
        level = np.minimum(level, np.searchsorted(degrees, np.maximum(1, d // 2), side="right") - 1)
        key = level.tobytes()
        at_least = float((cost[np.arange(len(d)), level] * np.asarray(degrees)[level]).sum()) / cp
        if key in tried or (best and at_least * (1 + _GOOD_ENOUGH) >= best[0]):
            continue
        tried.add(key)
        piece = cost[np.arange(len(d)), level]
        chunks, work = _place(d, [degrees[i] for i in level.tolist()], piece, cost[:, 0], n_tokens, cp, base)
        if best is None or work < best[0]:
            best = (work, chunks)
    assert best is not None
    table = np.array([c for own in best[1] for c in own], dtype=np.int64).reshape(-1, 3)
    rank = np.repeat(np.arange(cp), [len(own) for own in best[1]])
    return assemble("hybrid", lengths, n_tokens, cp, rank, table)


def piece_cost(d: np.ndarray, r: int, kernel: KernelCost) -> np.ndarray:
    """Seconds of one of the r pieces of documents d: the first and last of 2 r chunks, or for r = 1 all of it."""
    if r == 1:
        return kernel.seconds(d, d)
    chunk = np.maximum(1, d // (2 * r))
    return kernel.seconds(chunk, chunk) + kernel.seconds(chunk, d)


def _base_cost(d: np.ndarray, cost: np.ndarray) -> float:
    """Seconds of a token in the cheaper half of the tokens."""
    if not len(d):
        return 0.0
    order = np.argsort(cost / d)
    half = np.cumsum(d[order]) <= d.sum() / 2
    half[0] = True
    return float(cost[order][half].sum() / d[order][half].sum())


def _place(
    d: np.ndarray, degrees: list[int], piece: np.ndarray, whole_cost: np.ndarray, n_tokens: int, cp: int, base: float
) -> tuple[list[list[Chunk]], float]:
    """(chunks of every rank, predicted work of the slowest one).

    Args:
        degrees, piece: ranks over which each document is cut, and the cost of one of its pieces.
        whole_cost: of every document in one piece.
    """
    mine: list[list[Chunk]] = [[] for _ in range(cp)]
    room = [n_tokens // cp] * cp
    work = [0.0] * cp
    # Ranks by their work beyond the base cost of the tokens they hold.
    heap = [(0.0, rank) for rank in range(cp)]
    order = np.argsort(base * d / np.maximum(1, degrees) - piece, kind="stable").tolist()
    late: list[int] = []
    for doc, length, cost in zip(order, d[order].tolist(), piece[order].tolist()):
        r = degrees[doc]
        if r == 1:
            taken = heap[0]
            if room[taken[1]] >= length:
                rank = taken[1]
                mine[rank].append((doc, 0, length))
                room[rank] -= length
                work[rank] += cost
                heapq.heapreplace(heap, (taken[0] + cost - base * length, rank))
                continue
        bounds = [length * i // (2 * r) for i in range(2 * r + 1)]
        sizes = [bounds[i + 1] - bounds[i] + bounds[2 * r - i] - bounds[2 * r - 1 - i] for i in range(r)]
        largest = max(sizes)
        chosen = heapq.nsmallest(r, (x for x in heap if room[x[1]] >= largest))
        if len(chosen) < r:
            late.append(doc)
            continue
        for i, (beyond, rank) in enumerate(chosen):
            pair = [(doc, bounds[i], bounds[i + 1]), (doc, bounds[2 * r - 1 - i], bounds[2 * r - i])]
            mine[rank] += pair if r > 1 else [(doc, 0, length)]
            room[rank] -= sizes[i]
            work[rank] += cost
            heap.remove((beyond, rank))
            heap.append((beyond + cost - base * sizes[i], rank))
        heapq.heapify(heap)
    # No rank has room for these as they should be: fill up rank by rank, the one with most room first.
    for doc in late:
        start, length = 0, int(d[doc])
        while start < length:
            rank = max(range(cp), key=room.__getitem__)
            stop = min(length, start + room[rank])
            mine[rank].append((doc, start, stop))
            room[rank] -= stop - start
            share = pairs(start, stop) / pairs(0, length)
            work[rank] += float(whole_cost[doc]) * share
            start = stop
    return mine, max(work)

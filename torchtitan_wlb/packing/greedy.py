"""Greedy assignment by work: documents to micro-batches, micro-batches to data-parallel ranks."""

import heapq

import numpy as np


def spread(
    weights: np.ndarray,
    tokens: np.ndarray,
    bins: int,
    capacity: int | np.ndarray,
    load: np.ndarray | None = None,
) -> np.ndarray:
    """Put every document, in the given order, into the lightest bin.

    A bin that has no room for the document it should get is full: it gets none of the documents after it either. Those
    for which no bin is left are tried again at the end, each in the bin that then has most room.

    Args:
        weights: [k] work of the documents. tokens: [k].
        capacity: tokens a bin may hold, or [bins] one for each.
        load: [bins] work that is in them already.

    Returns:
        [k] bin of every document, -1 where no bin has room.
    """
    where = [-1] * len(tokens)
    room = np.broadcast_to(capacity, bins).tolist()
    heap = list(zip([0.0] * bins if load is None else load.tolist(), range(bins)))
    heapq.heapify(heap)
    skipped = []
    for i, (weight, length) in enumerate(zip(weights.tolist(), tokens.tolist())):
        while heap and room[heap[0][1]] < length:
            heapq.heappop(heap)
        if not heap:
            skipped.append(i)
            continue
        load, b = heap[0]
        heapq.heapreplace(heap, (load + weight, b))
        room[b] -= length
        where[i] = b
    emptiest = [(-r, b) for b, r in enumerate(room)]
    heapq.heapify(emptiest)
    for i in skipped:
        r, b = emptiest[0]
        if -r >= tokens[i]:
            heapq.heapreplace(emptiest, (r + int(tokens[i]), b))
            where[i] = b
    return np.array(where, dtype=np.int64)


def deal(work: list[float], dp: int, step: int, sort: bool) -> list[list[int]]:
    """Which micro-batches each data-parallel rank trains, in order: dp lists of N / dp indices.

    With sort, most work first, to the rank with least work so far, so that ranks are even. Ties and the order inside a
    rank rotate with the step: no rank and no pipeline slot always gets the largest. Without sort (plain), in order.
    """
    m = len(work) // dp
    if not sort:
        return [list(range(r * m, (r + 1) * m)) for r in range(dp)]
    hands: list[list[int]] = [[] for _ in range(dp)]
    heap = [(0.0, (r + step) % dp, r) for r in range(dp)]
    heapq.heapify(heap)
    for b in sorted(range(len(work)), key=lambda b: -work[b]):
        total, tie, rank = heapq.heappop(heap)
        hands[rank].append(b)
        if len(hands[rank]) < m:
            heapq.heappush(heap, (total + work[b], tie, rank))
    return [hand[step % m :] + hand[: step % m] for hand in hands]

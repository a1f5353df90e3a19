"""Greedy assignment by work: documents to micro-batches, micro-batches to data-parallel ranks."""

import heapq

import numpy as np

from torchtitan_wlb.packing.objective import StepObjective


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
    _use_room(skipped, tokens, room, where)
    return np.array(where, dtype=np.int64)


def _use_room(skipped: list[int], tokens: np.ndarray, room: list[int], where: list[int]) -> None:
    """Put documents that found no place, in order, into the bin that then has most room, where that is enough."""
    emptiest = [(-r, b) for b, r in enumerate(room)]
    heapq.heapify(emptiest)
    for i in skipped:
        r, b = emptiest[0]
        if -r >= tokens[i]:
            heapq.heapreplace(emptiest, (r + int(tokens[i]), b))
            where[i] = b


def spread_over_ranks(
    work: np.ndarray,
    tokens: np.ndarray,
    objective: StepObjective,
    bins: int,
    capacity: int | np.ndarray,
    *,
    token_cost: float = 0.0,
    multiple: int = 1,
) -> np.ndarray:
    """Put every document, in the given order, into the rank that would be ready first, and there into the micro-batch
    with the least work; without a pipeline, where only a rank's sum counts, into the one with the fewest tokens.

    A rank none of whose micro-batches has room for the document it should get is full: it gets none after it either.
    Those for which no rank is left are tried again at the end, each in the micro-batch with most room.

    Args:
        work, tokens: [k] of the documents.
        objective: rank r has micro-batches r M to (r + 1) M - 1.
        capacity: tokens a micro-batch may hold, or [bins] one for each.
        token_cost, multiple: micro-batches are padded to a multiple of tokens, each of which costs so much.

    Returns:
        [k] micro-batch of every document, -1 where none has room.
    """
    m, bubble = bins // objective.dp, objective.bubble
    where = [-1] * len(tokens)
    room = np.broadcast_to(capacity, bins).tolist()
    # Of a micro-batch: padding so far, work; of a rank: work, work of its largest micro-batch.
    slack, load, total, largest = [0] * bins, [0.0] * bins, [0.0] * objective.dp, [0.0] * objective.dp
    ranks = [(0.0, r) for r in range(objective.dp)]
    inside = [[(0.0 if bubble else -float(room[b]), b) for b in range(r * m, (r + 1) * m)] for r in range(objective.dp)]
    for rank in inside:
        heapq.heapify(rank)
    skipped = []
    unpadded = (work - token_cost * tokens).tolist()
    for i, (w, t) in enumerate(zip(unpadded, tokens.tolist())):
        b = -1
        while ranks and b < 0:
            r = ranks[0][1]
            b = inside[r][0][1]
            if room[b] < t:
                b = max(range(r * m, (r + 1) * m), key=room.__getitem__)
                if room[b] < t:
                    heapq.heappop(ranks)
                    b = -1
        if b < 0:
            skipped.append(i)
            continue
        where[i] = b
        room[b] -= t
        slack[b] -= t
        if slack[b] < 0:
            more = -(slack[b] // multiple) * multiple
            slack[b] += more
            w += token_cost * more
        total[r] = ready = total[r] + w
        key = -float(room[b])
        if bubble:
            load[b] = key = load[b] + w
            if key > largest[r]:
                largest[r] = key
            ready += bubble * (largest[r] if largest[r] * m > ready else ready / m)
        if inside[r][0][1] == b:
            heapq.heapreplace(inside[r], (key, b))
        else:
            inside[r] = [(key if c == b else k, c) for k, c in inside[r]]
            heapq.heapify(inside[r])
        heapq.heapreplace(ranks, (ready, r))
    _use_room(skipped, tokens, room, where)
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

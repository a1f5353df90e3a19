"""Shard plan that cuts only what must be cut: long documents over as many ranks as they need, the others whole on one rank.

WLB-LLM leaves the mix inside one micro-batch open (§8). Cutting makes chunks short, which kernels dislike, and its K/V travel; keeping documents whole makes
ranks unequal. So:

1. A document is cut over r = 1, 2, 4 ... CP ranks, into 2 r chunks, early ones paired with late ones: r pieces of equal work. r is the least for
   which a piece costs at most `grain` of the average rank.
2. Pieces go, dearest first, to the ranks that are then lightest and have room. Every rank must end with T / CP tokens, and a token costs at least
   what it costs in a short document, so what counts is work beyond that: LPT on cost - base x tokens.
3. What finds no room whole is cut where a rank is full: equal token counts demand it. Padding fills the rest.
4. The grain is searched: the plan with the smallest predicted maximum over ranks wins.
"""

import heapq

import numpy as np

from torchtitan_wlb.context_parallel.kernel_cost import KernelCost
from torchtitan_wlb.context_parallel.shard_plan import ShardPlan, merge_chunks

_GRAINS = (2.0, 1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03, 0.0)

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
    cost = np.stack([_piece_cost(d, r, kernel) for r in degrees], axis=1) if len(d) else np.zeros((0, len(degrees)))
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
        if key in tried or (best and at_least >= best[0]):
            continue
        tried.add(key)
        chunks, work = _place(d, [degrees[i] for i in level.tolist()], cost, level, n_tokens, cp, base, kernel)
        if best is None or work < best[0]:
            best = (work, chunks)
    assert best is not None
    padding, merged = 0, []
    for own in best[1]:
        own = sorted(own)
        fill = n_tokens // cp - sum(stop - start for _, start, stop in own)
        merged.append(merge_chunks([*own, (len(lengths), padding, padding + fill)]))
        padding += fill
    return ShardPlan("hybrid", tuple(lengths), n_tokens, tuple(merged))


def _piece_cost(d: np.ndarray, r: int, kernel: KernelCost) -> np.ndarray:
    """Seconds of one of the r pieces of documents d: the first and the last of 2 r chunks (the whole document for r = 1)."""
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
    d: np.ndarray,
    degrees: list[int],
    cost: np.ndarray,
    level: np.ndarray,
    n_tokens: int,
    cp: int,
    base: float,
    kernel: KernelCost,
) -> tuple[list[list[Chunk]], float]:
    """(chunks of every rank, predicted work of the slowest one)."""
    mine: list[list[Chunk]] = [[] for _ in range(cp)]
    room = [n_tokens // cp] * cp
    beyond = [0.0] * cp  # work beyond the base cost of the tokens
    work = [0.0] * cp
    piece = cost[np.arange(len(d)), level]
    # A piece of a document cut r ways holds d / r tokens.
    order: list[int] = np.argsort(-(piece - base * d / np.maximum(1, degrees)) if len(d) else d).tolist()
    late: list[int] = []
    for doc in order:
        r, length = degrees[doc], int(d[doc])
        bounds = [length * i // (2 * r) for i in range(2 * r + 1)]
        sizes = [bounds[i + 1] - bounds[i] + bounds[2 * r - i] - bounds[2 * r - 1 - i] for i in range(r)]
        ranks = heapq.nsmallest(r, (i for i in range(cp) if room[i] >= max(sizes)), key=beyond.__getitem__)
        if len(ranks) < r:
            late.append(doc)
            continue
        for i, rank in enumerate(ranks):
            pair = [(doc, bounds[i], bounds[i + 1]), (doc, bounds[2 * r - 1 - i], bounds[2 * r - i])]
            mine[rank] += pair if r > 1 else [(doc, 0, length)]
            room[rank] -= sizes[i]
            work[rank] += float(piece[doc])
            beyond[rank] += float(piece[doc]) - base * sizes[i]
    # No rank has room for these as they should be: fill up rank by rank, the one with most room first.
    for doc in late:
        start, length = 0, int(d[doc])
        while start < length:
            rank = max(range(cp), key=room.__getitem__)
            stop = min(length, start + room[rank])
            mine[rank].append((doc, start, stop))
            room[rank] -= stop - start
            work[rank] += float(kernel.seconds(np.array([stop - start]), np.array([stop]))[0])
            start = stop
    return mine, max(work)

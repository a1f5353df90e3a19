"""How the documents of a step become N micro-batches: the baselines and Algorithm 1. Ints and floats, no torch; equal
on all ranks.

A packer takes what it needs from the step's arrivals and returns N micro-batches; what it keeps back it shows in
`waiting()` and in its state. Nothing is lost: arrived = packed + waiting, at every step. After the data has ended it
drains.
"""

import heapq
from collections.abc import Callable
from typing import Protocol

import numpy as np

from torchtitan_wlb.data.sampler import DocumentOrder
from torchtitan_wlb.packing.cost_model import CostModel
from torchtitan_wlb.packing.spans import NONE, START, STOP, as_spans, group, lengths, longest_first

Packed = tuple[np.ndarray, np.ndarray]  # (spans [k, 4], bounds [N + 1])


class Arrivals:
    """The documents that a step may draw.

    Args:
        order: of all documents.
        step: drawing now.
        due_tokens: tokens that are due in this step (step x N x seq_len less what has been drawn).
    """

    def __init__(self, order: DocumentOrder, step: int, due_tokens: int):
        self._order, self.step, self._due_tokens = order, step, due_tokens
        self.count = 0

    def due(self) -> np.ndarray:
        """Draw the documents that are due, [k, 4]."""
        return self.take(self._due_tokens)

    def take(self, tokens: int) -> np.ndarray:
        """Draw whole documents until they reach some tokens, [k, 4]."""
        return self.draw(self.peek(tokens))

    def peek(self, tokens: int) -> np.ndarray:
        """What `take` would draw."""
        ids, n = self._order.peek(tokens)
        return np.column_stack([ids, np.zeros_like(ids), n, np.full_like(ids, self.step)])

    def draw(self, spans: np.ndarray) -> np.ndarray:
        """Draw the first documents that `peek` has shown."""
        self._order.advance(spans[:, 0])
        self.count += len(spans)
        return spans

    @property
    def ended(self) -> bool:
        """Whether no document is left to draw."""
        return self._order.exhausted


class Packer(Protocol):
    def pack(self, arrivals: Arrivals) -> Packed:
        """The N micro-batches of a step."""
        ...

    def waiting(self) -> np.ndarray:
        """Spans kept for later steps, [k, 4]."""
        ...

    def state(self) -> list[list[list[int]]]:
        """Lists of spans from which `restore` goes on exactly."""
        ...

    def restore(self, state: list[list[list[int]]]) -> None: ...


class Plain:
    """Concatenate documents in order of arrival and cut at the context window (the paper's Plain-4D)."""

    def __init__(self, n: int, seq_len: int):
        self.n, self.seq_len = n, seq_len
        self.carry = NONE

    def pack(self, arrivals: Arrivals) -> Packed:
        stream = np.concatenate([self.carry, arrivals.due()])
        stop = np.cumsum(lengths(stream))
        start = stop - lengths(stream)
        # Cut points: where a document ends, and every window.
        cuts = np.unique(np.concatenate([stop, np.arange(1, self.n + 1) * self.seq_len]))
        cuts = cuts[cuts <= (stop[-1] if len(stop) else 0)]
        first = np.concatenate([[0], cuts[:-1]]) if len(cuts) else cuts
        document = np.searchsorted(stop, first, side="right")
        pieces = stream[document]
        pieces[:, START] += first - start[document]
        pieces[:, STOP] = pieces[:, START] + cuts - first
        window = first // self.seq_len
        self.carry = pieces[window >= self.n]
        return group(pieces[window < self.n], window[window < self.n], self.n)

    def waiting(self) -> np.ndarray:
        return self.carry

    def state(self):
        return [self.carry.tolist()]

    def restore(self, state) -> None:
        self.carry = as_spans(state[0])


class PlainWhole:
    """Keep documents whole: next fit into windows of fixed length, the tail is padded. What does not fit is drawn next
    time."""

    def __init__(self, n: int, seq_len: int):
        self.n, self.seq_len = n, seq_len

    def pack(self, arrivals: Arrivals) -> Packed:
        shown = arrivals.peek(self.n * self.seq_len)
        window, room = 0, self.seq_len
        where = []
        for length in lengths(shown).tolist():
            if length > room:
                window, room = window + 1, self.seq_len
                if window == self.n:
                    break
            where.append(window)
            room -= length
        return group(arrivals.draw(shown[: len(where)]), np.array(where, dtype=np.int64), self.n)

    def waiting(self) -> np.ndarray:
        return NONE

    def state(self):
        return []

    def restore(self, state) -> None:
        pass


class Fixed:
    """Repack the documents of `window` global batches into sequences of fixed length that are even in sum d²
    (Fixed-4D).

    Args:
        assign: function (weights [k], tokens [k], bins, capacity) -> bin of every document, -1 for those that do not
            fit; documents come longest first. `spread` is the greedy one, `solver.assign_exactly` the integer program.
    """

    def __init__(self, n: int, seq_len: int, window: int, assign: Callable):
        self.n, self.seq_len, self.window, self.assign = n, seq_len, window, assign
        self.carry = NONE
        self.planned: list[np.ndarray] = []  # micro-batches of the steps to come

    def pack(self, arrivals: Arrivals) -> Packed:
        if not self.planned:
            bins = self.window * self.n
            drawn = arrivals.take(bins * self.seq_len - int(lengths(self.carry).sum()))
            spans = longest_first(np.concatenate([self.carry, drawn]))
            tokens = lengths(spans)
            where = np.asarray(self.assign(tokens.astype(float) ** 2, tokens, bins, self.seq_len))
            self.carry = spans[where < 0]
            self.planned = [spans[where == b] for b in range(bins)]
        now, self.planned = self.planned[: self.n], self.planned[self.n :]
        return np.concatenate([NONE, *now]), np.cumsum([0, *map(len, now)])

    def waiting(self) -> np.ndarray:
        return np.concatenate([self.carry, *self.planned])

    def state(self):
        return [self.carry.tolist(), *(mb.tolist() for mb in self.planned)]

    def restore(self, state) -> None:
        self.carry, *self.planned = map(as_spans, state)


class WLBPaper:
    """Algorithm 1 of WLB-LLM (§4.3): variable length, outlier queues, left-overs first.

    A document with L_i <= length < L_(i+1) waits in queue i, first in first out; a queue that holds n releases n
    together.

    Args:
        n: micro-batches a step.
        capacity: tokens a micro-batch may hold.
        thresholds: L_1 < L_2 < ...; shorter documents do not wait.
    """

    def __init__(self, n: int, capacity: int, thresholds: tuple[int, ...], cost: CostModel):
        self.n, self.capacity, self.thresholds, self.cost = n, capacity, thresholds, cost
        self.queues = [NONE] * len(thresholds)
        self.left_over = NONE

    def pack(self, arrivals: Arrivals) -> Packed:
        drawn = arrivals.due()
        level = np.searchsorted(self.thresholds, lengths(drawn), side="right") - 1
        new = [drawn[level < 0]]
        for i, queue in enumerate(self.queues):
            queue = np.concatenate([queue, drawn[level == i]])
            leaving = self.n if len(queue) >= self.n or arrivals.ended else 0
            new.append(queue[:leaving])
            self.queues[i] = queue[leaving:]
        spans = np.concatenate([self.left_over, longest_first(np.concatenate(new))])
        where = self._place(spans)
        self.left_over = spans[where < 0]
        return group(spans[where >= 0], where[where >= 0], self.n)

    def _place(self, spans: np.ndarray) -> np.ndarray:
        """Least work if it fits, else fewest tokens if it fits, else keep (-1)."""
        where = np.full(len(spans), -1)
        work, tokens = [0.0] * self.n, [0] * self.n
        cost = self.cost.documents(lengths(spans)).tolist()
        for i, length in enumerate(lengths(spans).tolist()):
            for b in (work.index(min(work)), tokens.index(min(tokens))):
                if tokens[b] + length <= self.capacity:
                    where[i] = b
                    work[b] += cost[i]
                    tokens[b] += length
                    break
        return where

    def waiting(self) -> np.ndarray:
        return np.concatenate([*self.queues, self.left_over])

    def state(self):
        return [*(q.tolist() for q in self.queues), self.left_over.tolist()]

    def restore(self, state) -> None:
        *self.queues, self.left_over = map(as_spans, state)


def spread(weights: np.ndarray, tokens: np.ndarray, bins: int, capacity: int | np.ndarray) -> np.ndarray:
    """Greedy: every document, in the given order, to the lightest bin; one that has no room for it gets no more
    documents until all others have been dealt, then what is left goes where most room is.

    Args:
        weights: [k] work of the documents. tokens: [k].
        capacity: tokens a bin may hold, or [bins] one for each.

    Returns:
        [k] bin of every document, -1 where no bin has room.
    """
    where = [-1] * len(tokens)
    room = np.broadcast_to(capacity, bins).tolist()
    heap = [(0.0, b) for b in range(bins)]
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

    With sort, longest first to the rank with least work that has room, so that ranks are even. Ties and the order
    inside a
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

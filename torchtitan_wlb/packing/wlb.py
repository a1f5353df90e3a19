"""The default packer: long documents leave a sorted pool as a run of neighbours, when the balance is worth it.

Algorithm 1 lets outliers go when a queue of their length class is full. Here there are no classes. Documents above a
third of an average micro-batch wait in one pool, sorted by length, and every step asks of every run of neighbours in it
(at most 2 N of them):

1. Deal the run to the N micro-batches, longest first, the second N in reverse.
2. Pour the step's short documents in like water, under the token cap of every micro-batch: a level by bisection,
   nothing is packed.
3. Judge it:
     excess = N x max - sum of the work: the time for which micro-batches wait for the slowest
     gain   = delay_price x (waiting that ends now, in token-steps) - excess
              - delay_price x (tokens that find no room and wait a step)

The run with the largest gain leaves (perhaps none), with every document at its age limit; then everything is packed
greedily. One knob, delay_price, walks along the front of balance against delay: the time, in units of a token's linear
work, that ending one step of waiting of one token is worth. All runs are evaluated at once in numpy.
"""

import numpy as np

from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.packing.deadline import Deadline
from torchtitan_wlb.packing.greedy import spread
from torchtitan_wlb.packing.packer import Arrivals, Packed, Packer
from torchtitan_wlb.packing.spans import ARRIVAL, NONE, group, lengths, longest_first

_LONG = 1 / 3  # of an average micro-batch's work: longer documents go through the pool
_AGE_WEIGHT = 0.5  # a step more of age makes ending the wait worth half as much again
_LEAST_TOKENS = 1 / 4  # of N x seq_len in a step, if the pool has them
_MAX_CANDIDATES = 256  # runs evaluated a step, about
_MAX_COLUMNS = 128  # micro-batches on which they are evaluated


class WLB(Packer):
    """Workload-balanced packing.

    Args:
        deadline: n micro-batches a step, and the longest delay.
        seq_len: context window, the mean tokens of a micro-batch.
        capacity: tokens a micro-batch may hold. Always wins over balance.
        in_flight: (micro-batches, tokens): so many together may hold so many tokens; (0, 0) for no such limit.
        multiple: to which micro-batches are padded; padding counts in what they hold together.
        delay_price: see above.
    """

    def __init__(
        self,
        deadline: Deadline,
        seq_len: int,
        capacity: int,
        cost: CostModel,
        *,
        in_flight: tuple[int, int] = (0, 0),
        multiple: int = 1,
        delay_price: float = 0.12,
    ):
        self.deadline, self.n, self.capacity = deadline, deadline.n, capacity
        self.seq_len, self.cost, self.delay_price = seq_len, cost, delay_price
        self.in_flight, self.multiple = in_flight, multiple
        self.kept = [NONE, NONE]  # the pool, and what was left over
        self.seen = [0.0, 0]  # work and tokens drawn so far, for the average micro-batch

    def pack(self, arrivals: Arrivals) -> Packed:
        drawn = arrivals.due()
        work = self.cost.documents(lengths(drawn))
        self.seen = [self.seen[0] + float(work.sum()), self.seen[1] + int(lengths(drawn).sum())]
        is_long = work > _LONG * self.seen[0] / max(1, self.seen[1]) * self.seq_len
        pool, left_over = self.kept
        due = self.deadline.due(np.concatenate([pool, left_over, drawn]), arrivals.step)
        pool = longest_first(np.concatenate([pool, drawn[is_long]]))
        # Whoever was left over goes first, so that nobody is left over again and again.
        short = np.concatenate([left_over, longest_first(drawn[~is_long])])
        leaving = self._release(pool, short, arrivals.step, due, everything=arrivals.ended)
        spans = np.concatenate([pool[leaving], short])
        where = self._place(spans, int(leaving.sum()))
        if (where[spans[:, ARRIVAL] <= due] < 0).any():
            where = self.deadline.place(spans, spans[:, ARRIVAL] <= due, self.cost.documents(lengths(spans)))
        self.kept = [pool[~leaving], longest_first(spans[where < 0])]
        return group(spans[where >= 0], where[where >= 0], self.n)

    def _release(self, pool: np.ndarray, short: np.ndarray, step: int, due: int, everything: bool) -> np.ndarray:
        """Which documents of the pool leave, bool [pool]; those that arrived up to step `due` must."""
        age = step - pool[:, ARRIVAL]
        overdue = pool[:, ARRIVAL] <= due
        if everything or not len(pool):
            return np.ones(len(pool), dtype=bool)
        # Many micro-batches: every g-th document of the sorted pool stands for its neighbours, on n / g micro-batches.
        g = max(1, self.n // _MAX_COLUMNS)
        size = len(pool)
        n, sample = self.n // g, np.minimum(np.arange(g // 2, size + g // 2, g), size - 1)
        tokens = lengths(pool)[sample]
        run = _runs(len(tokens), n)
        # One document at its age limit is enough to set the maximum, so it must show in its group.
        leaving = run | np.logical_or.reduceat(overdue, np.arange(0, size, g))
        # A candidate's documents are dealt to micro-batches: the r-th to r, those from n on back again from 2 n - 1.
        rank = np.cumsum(leaving, axis=1) - 1
        leaving &= rank < 2 * n
        candidate, document = np.nonzero(leaving)
        r = rank[candidate, document]
        cell = candidate * n + np.where(r < n, r, 2 * n - 1 - r)
        cost = self.cost.documents(tokens)
        load, held = (np.bincount(cell, x[document], len(run) * n).reshape(-1, n) for x in (cost, tokens))

        short_tokens = float(lengths(short).sum()) / g
        per_token = float(self.cost.documents(lengths(short)).sum()) / g / max(1.0, short_tokens)
        padded = -(-held // self.multiple) * self.multiple
        cap = _caps(padded, self.capacity, self.in_flight, self.multiple)
        poured = _pour(load / per_token, cap - held, short_tokens) if short_tokens else np.zeros_like(load)
        work = load + poured * per_token
        excess = (n * work.max(axis=1) - work.sum(axis=1)) / self.cost.token_cost
        ended_wait = leaving @ (tokens * (1 + _AGE_WEIGHT * age[sample]))
        gain = self.delay_price * (ended_wait - (short_tokens - poured.sum(axis=1))) - excess
        trained = leaving @ tokens + poured.sum(axis=1)
        fits = (held <= cap).all(axis=1) & (_top_sum(padded, self.in_flight[0]) <= self.in_flight[1])
        # No step may be nearly empty: that can happen where long documents are all there is.
        fits &= trained >= min(_LEAST_TOKENS * n * self.seq_len, np.max(trained[fits], initial=0.0))
        # If the documents at their age limit do not fit together, they leave all the same and packing keeps what has no
        # room.
        best = int(np.argmax(np.where(fits, gain, -np.inf)))
        return (run[best] & fits[best])[np.arange(size) // g] | overdue

    def _place(self, spans: np.ndarray, n_long: int) -> np.ndarray:
        """Micro-batch of every span, -1 for those without room."""
        tokens = lengths(spans)
        work = self.cost.documents(tokens)
        capacity: int | np.ndarray = self.capacity
        if self.in_flight[0]:
            # Long documents first: they decide how far the others may fill up.
            limit = min(self.capacity, self.in_flight[1] // self.in_flight[0] // self.multiple * self.multiple)
            where = spread(work[:n_long], tokens[:n_long], self.n, self.capacity)
            held = np.bincount(where[where >= 0], tokens[:n_long][where >= 0], self.n)[None]
            padded = -(-held // self.multiple) * self.multiple
            fits = _top_sum(padded, self.in_flight[0]) <= self.in_flight[1]
            caps = _caps(padded, self.capacity, self.in_flight, self.multiple)[0].astype(np.int64)
            capacity = caps if fits[0] else limit
        return spread(work, tokens, self.n, capacity)

    def state(self):
        return [*super().state(), self.seen]

    def restore(self, state) -> None:
        *kept, (work, tokens) = state
        if not (0 <= work < float("inf") and isinstance(tokens, int) and tokens >= 0):
            raise ValueError(f"work {work} of {tokens} tokens")
        super().restore(kept)
        self.seen = [work, tokens]


def _runs(size: int, n: int) -> np.ndarray:
    """Candidate runs of a sorted pool as rows of a mask [candidates, size]: none, and neighbours [i, i + m) for m up to
    2 N.

    A small pool gets all of them, a large one a grid of starts and lengths.
    """
    longest = min(size, 2 * n)
    i, m = np.arange(size), np.arange(1, longest + 1)
    if len(i) * len(m) > _MAX_CANDIDATES:
        m = np.unique(np.linspace(0, longest, 9).astype(int)[1:])
        i = np.unique(np.linspace(0, size - 1, _MAX_CANDIDATES // len(m)).astype(int))
    start, count = (x.ravel() for x in np.meshgrid(i, m))
    inside = start + count <= size
    start, stop = np.append(start[inside], 0), np.append((start + count)[inside], 0)
    position = np.arange(size)
    return (position >= start[:, None]) & (position < stop[:, None])


def _pour(load: np.ndarray, room: np.ndarray, amount: float) -> np.ndarray:
    """Fill the lowest first, as water would: level by bisection.

    Args:
        load: [c, n] height of every micro-batch, in tokens of what is poured.
        room: [c, n] what each can take. amount: to pour in total.

    Returns:
        [c, n] poured into each; less than amount in total only where all are full.
    """
    room = np.maximum(room, 0)
    low, high = load.min(axis=1, keepdims=True), load.max(axis=1, keepdims=True) + amount
    for _ in range(24):
        level = (low + high) / 2
        enough = np.minimum(np.maximum(level - load, 0), room).sum(axis=1, keepdims=True) >= amount
        low, high = np.where(enough, low, level), np.where(enough, level, high)
    return np.minimum(np.maximum(high - load, 0), room)


def _top_sum(tokens: np.ndarray, k: int) -> np.ndarray:
    """Sum of the k largest of every row, [c]."""
    return np.sort(tokens, axis=1)[:, tokens.shape[1] - k :].sum(axis=1)


def _caps(held: np.ndarray, capacity: int, in_flight: tuple[int, int], multiple: int = 1) -> np.ndarray:
    """How far each micro-batch may fill up, [c, n], so that any k together stay within the budget: what it holds, or
    the common level c at which the k largest of max(held, c) just reach the budget."""
    k, budget = in_flight
    if not k:
        return np.full(held.shape, float(capacity))
    largest = np.sort(held, axis=1)[:, ::-1][:, :k]
    before = np.cumsum(largest, axis=1) - largest
    # max(held, c) sums to at least before[j] + (k - j) c for every j, and to just that for the right one.
    level = ((budget - before) / np.arange(k, 0, -1)[: before.shape[1]]).min(axis=1, keepdims=True)
    level = np.floor(level / multiple) * multiple
    return np.clip(np.maximum(level, held), held, capacity)

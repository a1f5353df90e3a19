"""The default packer: long documents leave a sorted pool as a run of neighbours, when the balance is worth it.

Algorithm 1 lets outliers go when a queue of their length class is full. Here there are no classes. Documents above a
third of an average micro-batch wait in one pool, sorted by length, and every step asks of every run of neighbours in it
(at most 2 N of them):

1. Deal the run to the N micro-batches, longest first, the second N in reverse, and these to the data-parallel ranks.
2. Pour the step's short documents in like water, into the rank that would be ready first, under the token cap of every
   micro-batch: a level by bisection, nothing is packed.
3. Judge it, in tokens of linear work:
     excess = seconds of the step on this layout (objective.py) over those of equal micro-batches, on all ranks
     gain   = worth - excess - delay_price x (tokens that find no room and wait a step)

What leaving now is worth: delay_price x the waiting that ends, in token-steps. A single pipeline, whose largest
micro-batch is the longest document, looks at the documents of the next steps, too: leaving now is worth at most what
leaving in the best one of them would cost, and then little waiting is enough. So nobody waits for company that does not
come.

The run with the largest gain leaves (perhaps none), with every document at its age limit; then everything is packed
greedily. One knob, delay_price, walks along the front of balance against delay: the time that one step of waiting of
one token may cost, in units of a token's linear work. All runs are evaluated at once in numpy.
"""

from typing import Any

import numpy as np

from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.packing.deadline import Deadline
from torchtitan_wlb.packing.greedy import deal, spread, spread_over_ranks
from torchtitan_wlb.packing.objective import StepObjective
from torchtitan_wlb.packing.packer import Arrivals, Packed, Packer
from torchtitan_wlb.packing.spans import ARRIVAL, NONE, group, lengths, longest_first

_LONG = 1 / 3  # of an average micro-batch's work: longer documents go through the pool
_AGE_WEIGHT = 0.5  # a step more of age makes ending the wait worth half as much again
_LEAST_TOKENS = 1 / 4  # of N x seq_len in a step, if the pool has them
_AHEAD = 6  # steps for which a single pipeline looks for company
_KNOWN = 3.0  # how much more ending the wait is worth where it is known who comes
_MAX_EQUAL = 256  # micro-batches for which a second way to pack is tried
_MAX_CANDIDATES = 256  # runs evaluated a step, about
_MAX_COLUMNS = 128  # micro-batches on which they are evaluated


class WLB(Packer):
    """Workload-balanced packing.

    Args:
        deadline: n micro-batches a step, and the longest delay.
        objective: who waits for whom.
        mean_tokens: of a micro-batch.
        capacity: tokens a micro-batch may hold. Always wins over balance.
        in_flight: (micro-batches, tokens): so many together may hold so many tokens; (0, 0) for no such limit.
        multiple: to which micro-batches are padded; padding counts in what they hold together.
        delay_price: see above.
        max_step_tokens: trained in a step but for documents at their age limit, 0 for no limit.
    """

    def __init__(
        self,
        deadline: Deadline,
        objective: StepObjective,
        mean_tokens: int,
        capacity: int,
        cost: CostModel,
        *,
        in_flight: tuple[int, int] = (0, 0),
        multiple: int = 1,
        delay_price: float = 0.12,
        max_step_tokens: int = 0,
    ):
        self.deadline, self.n, self.capacity = deadline, deadline.n, capacity
        self.objective, self.mean_tokens, self.cost, self.delay_price = objective, mean_tokens, cost, delay_price
        self.in_flight, self.multiple, self.max_step_tokens = in_flight, multiple, max_step_tokens or 2**62
        self.kept = [NONE, NONE]  # the pool, and what was left over
        self.seen = [0.0, 0]  # work and tokens drawn so far, for the average micro-batch

    @property
    def average_work(self) -> float:
        """Of a micro-batch of all that has been drawn."""
        return self.seen[0] / max(1, self.seen[1]) * self.mean_tokens

    def pack(self, arrivals: Arrivals) -> Packed:
        drawn = arrivals.due()
        work = self.cost.documents(lengths(drawn))
        self.seen = [self.seen[0] + float(work.sum()), self.seen[1] + int(lengths(drawn).sum())]
        is_long = work > _LONG * self.average_work
        pool, left_over = self.kept
        due = self.deadline.due(np.concatenate([pool, left_over, drawn]), arrivals.step)
        pool = longest_first(np.concatenate([pool, drawn[is_long]]))
        # Whoever was left over goes first, so that nobody is left over again and again.
        short = np.concatenate([left_over, longest_first(drawn[~is_long])])
        leaving = self._release(pool, short, arrivals, due)
        spans = np.concatenate([pool[leaving], short])
        must = spans[:, ARRIVAL] <= due
        may = np.nonzero(must | (np.cumsum(lengths(spans)) <= self.max_step_tokens))[0]
        where = np.full(len(spans), -1)
        where[may] = self._place(spans[may], int((may < leaving.sum()).sum()))
        if (where[must] < 0).any():
            where = self.deadline.place(spans, must, self.cost.documents(lengths(spans)))
        self.kept = [pool[~leaving], longest_first(spans[where < 0])]
        return group(spans[where >= 0], where[where >= 0], self.n)

    def _release(self, pool: np.ndarray, short: np.ndarray, arrivals: Arrivals, due: int) -> np.ndarray:
        """Which documents of the pool leave, bool [pool]; those that arrived up to step `due` must."""
        age = arrivals.step - pool[:, ARRIVAL]
        overdue = pool[:, ARRIVAL] <= due
        if arrivals.ended or not len(pool):
            return np.ones(len(pool), dtype=bool)
        # Many micro-batches: every g-th document of the sorted pool stands for its neighbours, on n / g micro-batches.
        g = max(1, self.n // _MAX_COLUMNS)
        size = len(pool)
        dp, m, bubble = self._columns(g)
        n, sample = dp * m, np.minimum(np.arange(g // 2, size + g // 2, g), size - 1)
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
        per_token = float(self.cost.documents(lengths(short)).sum()) / g / short_tokens if short_tokens else 1.0
        padded = -(-held // self.multiple) * self.multiple
        cap = _caps(padded, self.capacity, self.in_flight, self.multiple)
        # Columns are dealt to ranks as documents are to columns, there and back.
        ranks = _there_and_back(dp, m)
        load, room = load[:, ranks], np.maximum(cap - held, 0)[:, ranks].sum(axis=2)  # [c, dp, m] and [c, dp]
        total, largest = load.sum(axis=2) / per_token, load.max(axis=2) / per_token
        amount = np.clip(self.max_step_tokens / g - held.sum(axis=1), 0, short_tokens)
        poured = _pour(total, largest, room, amount[:, None], bubble, m)
        total += poured
        seconds = (total + bubble * np.maximum(largest, total / m)).max(axis=1)
        perfect = total.sum(axis=1) / dp * (1 + bubble / m)
        excess = dp * (seconds - perfect) * per_token / self.cost.token_cost
        worth = self.delay_price * (leaving @ (tokens * (1 + _AGE_WEIGHT * age[sample])))
        if self.objective.dp == 1 and bubble:
            work = largest[:, 0] * per_token / self.cost.token_cost
            worth = np.minimum(_KNOWN * worth, self._cost_of_later(work, leaving @ tokens, bubble, arrivals))
        gain = worth - self.delay_price * (short_tokens - poured.sum(axis=1)) - excess
        trained = leaving @ tokens + poured.sum(axis=1)
        fits = (held <= cap).all(axis=1) & (_top_sum(padded, self.in_flight[0]) <= self.in_flight[1])
        fits &= held.sum(axis=1) <= self.max_step_tokens / g
        # No step may be nearly empty: that can happen where long documents are all there is.
        fits &= trained >= min(_LEAST_TOKENS * n * self.mean_tokens, np.max(trained[fits], initial=0.0))
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
        padding: Any = {"token_cost": self.cost.token_cost, "multiple": self.multiple}
        where = spread_over_ranks(work, tokens, self.objective, self.n, capacity, **padding)
        if self.objective.dp == 1 or not self.objective.bubble or self.n > _MAX_EQUAL:
            return where
        # Several pipelines: often all micro-batches as equal as can be, dealt to them, are as good for every rank.
        equal = spread(work, tokens, self.n, capacity)
        load = np.bincount(equal[equal >= 0], work[equal >= 0], self.n)
        hands = np.argsort(np.concatenate(deal(load.tolist(), self.objective.dp, 0, sort=True)))
        equal = np.where(equal >= 0, hands[equal], -1)
        return min(where, equal, key=lambda w: self._judge(w, work, tokens))

    def _judge(self, where: np.ndarray, work: np.ndarray, tokens: np.ndarray) -> tuple[int, float]:
        """(tokens without room, seconds of the step)."""
        placed = where >= 0
        load = np.bincount(where[placed], work[placed], self.n)
        return int(tokens[~placed].sum()), self.objective.seconds(load)

    def _cost_of_later(self, largest: np.ndarray, tokens: np.ndarray, bubble: float, arrivals: Arrivals) -> np.ndarray:
        """What it costs runs of one pipeline to leave in the best of the next steps: the waiting until then, and the
        bubble beyond that of the longest document that has arrived by then.

        Args:
            largest: [c] work of the largest micro-batch, in tokens. tokens: [c] of the run.

        Returns:
            [c] in tokens.
        """
        step_tokens = self.n * self.mean_tokens
        coming = lengths(arrivals.peek(_AHEAD * step_tokens))
        longest = np.zeros(_AHEAD)
        step = np.minimum((np.cumsum(coming) - 1) // step_tokens, _AHEAD - 1)
        np.maximum.at(longest, step, self.cost.documents(coming))
        company = np.maximum(np.maximum.accumulate(longest), self.average_work)[:, None] / self.cost.token_cost
        waiting = self.delay_price * np.arange(1, _AHEAD + 1)[:, None] * tokens
        return (bubble * np.maximum(largest - company, 0) + waiting).min(axis=0)

    def _columns(self, groups: int) -> tuple[int, int, float]:
        """(ranks, micro-batches a rank, bubble) on which candidates are evaluated, the n-th part of a step."""
        dp, m = self.objective.dp, self.n // self.objective.dp
        if groups == 1:
            return dp, m, self.objective.bubble
        dp = max(1, dp // groups) if m == 1 or dp >= groups else dp
        columns = max(1, self.n // groups // dp)
        return dp, columns, self.objective.bubble * columns / m

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

    A small pool gets all of them, a large one a grid of starts and lengths, and all shorter than some.
    """
    longest = min(size, 2 * n)
    i, m, shortest = np.arange(size), np.arange(1, longest + 1), np.zeros(0, dtype=int)
    if len(i) * len(m) > _MAX_CANDIDATES:
        m = np.unique(np.linspace(0, longest, 9).astype(int)[1:])
        i = np.unique(np.linspace(0, size - 1, _MAX_CANDIDATES // len(m)).astype(int))
        shortest = np.unique(np.linspace(size - longest, size - 1, _MAX_CANDIDATES // 4).astype(int))
    start, count = (x.ravel() for x in np.meshgrid(i, m))
    inside = start + count <= size
    start, stop = start[inside], (start + count)[inside]
    start, stop = np.concatenate([start, shortest, [0]]), np.concatenate([stop, np.full(len(shortest), size), [0]])
    position = np.arange(size)
    return (position >= start[:, None]) & (position < stop[:, None])


def _there_and_back(dp: int, m: int) -> np.ndarray:
    """Columns [dp, m] of every rank when columns are dealt to ranks in turn, every other turn backwards."""
    turns = np.arange(dp * m).reshape(m, dp)
    turns[1::2] = turns[1::2, ::-1].copy()
    return turns.T


def _pour(
    total: np.ndarray, largest: np.ndarray, room: np.ndarray, amount: np.ndarray, bubble: float, m: int
) -> np.ndarray:
    """Fill the rank that would be ready first, as water would: a level of seconds by bisection.

    A rank with w poured in is ready after total + w + bubble x max(largest, (total + w) / m): what is poured makes its
    micro-batches equal as far as it can.

    Args:
        total, largest: [c, dp] of every rank and of its largest micro-batch, in tokens of what is poured.
        room: [c, dp] what each can take. amount: [c, 1] to pour in total.

    Returns:
        [c, dp] poured into each; less than amount in total only where all are full.
    """

    def at(level: np.ndarray) -> np.ndarray:
        lower = np.minimum(level - bubble * largest, level / (1 + bubble / m)) - total
        return np.minimum(np.maximum(lower, 0), room)

    low = np.zeros((len(total), 1))
    high = (total + bubble * np.maximum(largest, total / m)).max(axis=1, keepdims=True) + amount * (1 + bubble)
    for _ in range(32):
        level = (low + high) / 2
        enough = at(level).sum(axis=1, keepdims=True) >= amount
        low, high = np.where(enough, low, level), np.where(enough, level, high)
    return at(high)


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

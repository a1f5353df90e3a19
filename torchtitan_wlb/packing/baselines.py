"""The baselines of the paper: plain (cut at the window), plain_whole (documents whole) and fixed (repacked)."""

from collections.abc import Callable

import numpy as np

from torchtitan_wlb.packing.deadline import Deadline
from torchtitan_wlb.packing.packer import Arrivals, Packed, Packer
from torchtitan_wlb.packing.spans import ARRIVAL, NONE, START, STOP, group, lengths, longest_first


class Plain(Packer):
    """Concatenate documents in order of arrival and cut at the context window (the paper's Plain-4D)."""

    def __init__(self, n: int, seq_len: int):
        self.n, self.seq_len = n, seq_len
        self.kept = [NONE]

    def pack(self, arrivals: Arrivals) -> Packed:
        stream = np.concatenate([*self.kept, arrivals.due()])
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
        self.kept = [pieces[window >= self.n]]
        return group(pieces[window < self.n], window[window < self.n], self.n)


class PlainWhole(Packer):
    """Keep documents whole: next fit into windows of fixed length, the tail is padded. What does not fit is drawn next
    time."""

    def __init__(self, n: int, seq_len: int):
        self.n, self.seq_len = n, seq_len
        self.kept = []

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


class Fixed(Packer):
    """Repack the documents of `window` global batches into sequences of fixed length that are even in sum d²
    (Fixed-4D).

    Args:
        deadline: n micro-batches a step, the tokens of each, and the longest delay.
        assign: function (weights [k], tokens [k], bins, capacity) -> bin of every document, -1 for those that do not
            fit; documents come longest first. `spread` is the greedy one, `solver.assign_exactly` the integer program.
    """

    def __init__(self, deadline: Deadline, window: int, assign: Callable):
        self.deadline, self.n, self.seq_len = deadline, deadline.n, deadline.capacity
        self.window, self.assign = window, assign
        self.kept = [NONE]  # what did not fit, then the micro-batches of the steps to come

    def _may_keep(self, arrays: int) -> bool:
        return arrays % self.n == 1 % self.n and 1 <= arrays <= self.window * self.n + 1

    def pack(self, arrivals: Arrivals) -> Packed:
        carry, *planned = self.kept
        if not planned:
            bins = self.window * self.n
            drawn = arrivals.take(bins * self.seq_len - int(lengths(carry).sum()))
            spans = longest_first(np.concatenate([carry, drawn]))
            tokens = lengths(spans)
            weights = tokens.astype(float) ** 2
            where = np.asarray(self.assign(weights, tokens, bins, self.seq_len))
            # Those that cannot wait for another window must leave in time in this one.
            due = spans[:, ARRIVAL] <= self.deadline.due(spans, arrivals.step, idle=self.window)
            leaves = arrivals.step + where // self.n - spans[:, ARRIVAL]
            if (due & ((where < 0) | (leaves > self.deadline.max_delay))).any():
                where = self.deadline.place(spans, due, weights, self.window)
            carry, planned = spans[where < 0], [spans[where == b] for b in range(bins)]
        now, self.kept = planned[: self.n], [carry, *planned[self.n :]]
        return np.concatenate([NONE, *now]), np.cumsum([0, *map(len, now)])

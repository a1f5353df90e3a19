"""Queues in which long documents wait until there is one for every micro-batch (WLB-LLM §4.2)."""

from bisect import bisect_right
from typing import NamedTuple


class Span(NamedTuple):
    """Part [start, stop) of a document; the whole of it unless a policy cuts it. `arrival` is the step that drew it."""

    id: int
    start: int
    stop: int
    arrival: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class OutlierQueues:
    """First in, first out queues by length: a span with L_i <= length < L_(i+1) waits in queue i.

    Args:
        thresholds: L_1 < L_2 < ...; shorter spans are not taken.
        n: a queue that holds n releases n together, one for each micro-batch.
    """

    def __init__(self, thresholds: tuple[int, ...], n: int):
        self.thresholds, self.n = thresholds, n
        self.queues: list[list[Span]] = [[] for _ in thresholds]

    def put(self, span: Span) -> bool:
        """Queue an outlier; False for a span below the first threshold."""
        level = bisect_right(self.thresholds, span.length) - 1
        if level < 0:
            return False
        self.queues[level].append(span)
        return True

    def release(self, drain: bool = False) -> list[Span]:
        """Take n spans of every queue that holds at least n; with drain, up to n of every queue."""
        out: list[Span] = []
        for queue in self.queues:
            if len(queue) >= self.n or drain:
                out += queue[: self.n]
                del queue[: self.n]
        return out

"""Nobody waits for ever: which documents must leave now, and how many may wait, so that all leave within max_delay.

Oldest first, every document into the first micro-batch that has room for it: two micro-batches filled one after the
other hold more than one capacity together, or the second one's first document would be in the first. So k steps of n
micro-batches train the oldest (k n - 1) / 2 capacities of waiting tokens at least, whatever the lengths. From that
follow the steps that a document needs at most, given the tokens that are older: it must leave when it cannot need one
step more; and no more may wait than can be trained in max_delay steps.
"""

from dataclasses import dataclass

import numpy as np

from torchtitan_wlb.packing.greedy import spread
from torchtitan_wlb.packing.spans import ARRIVAL, lengths

_STEPS = 4  # in units of n x longest: packing for balance keeps 0.2 to 2 of them waiting


@dataclass(frozen=True)
class Deadline:
    """The bound of a packer.

    Attributes:
        n, capacity: micro-batches a step, and tokens that each may hold.
        max_delay: steps after which a document has left.
        longest: tokens of the longest document.
    """

    n: int
    capacity: int
    max_delay: int
    longest: int

    @property
    def room(self) -> int:
        """Tokens that may be there together when a step has drawn (the last document may go beyond it): those that can
        be trained in time, and no more than a few steps of them, since waiting for room saves nothing."""
        in_time = (self.max_delay * self.n - 1) * self.capacity // 2 - self.longest
        return min(in_time, _STEPS * self.n * self.longest)

    def least_delay(self, window: int = 0) -> int:
        """The smallest max_delay at which a step may draw n x longest tokens while as many wait; with repacking over a
        window of steps, for which documents wait twice at most."""
        return -(-(4 * (self.n + 1) * self.longest // self.capacity + 1) // self.n) + 2 * window

    def due(self, waiting: np.ndarray, step: int, idle: int = 0) -> int:
        """Documents that arrived up to this step must leave now; -1 if none must.

        Args:
            waiting: spans of all that wait, [k, 4].
            idle: steps after this one for which the others will wait at least.
        """
        spans = waiting[np.argsort(waiting[:, ARRIVAL], kind="stable")]
        tokens = np.cumsum(lengths(spans))  # of those that are older, and its own
        steps_needed = -(-(2 * tokens // self.capacity + 1) // self.n)
        steps_left = self.max_delay - (step - spans[:, ARRIVAL]) - idle
        return int(np.max(spans[steps_needed > steps_left, ARRIVAL], initial=-1))

    def place(self, spans: np.ndarray, due: np.ndarray, weights: np.ndarray, steps: int = 1) -> np.ndarray:
        """Micro-batch of every span, -1 for those without room: those that must leave now, oldest first, each into the
        first micro-batch with room; then the others by weight. For when packing by weight alone leaves out one that
        must leave.

        Args:
            spans: [k, 4]; due: [k]. weights: [k] work of each.
            steps: planned together; micro-batch b belongs to step b // n.
        """
        tokens, where = lengths(spans), np.full(len(spans), -1)
        room = np.full(self.n * steps, self.capacity)
        load = np.zeros(self.n * steps)
        first = np.nonzero(due)[0]
        for i in first[np.argsort(spans[first, ARRIVAL], kind="stable")].tolist():
            b = int(np.argmax(room >= tokens[i]))
            if room[b] >= tokens[i]:
                where[i] = b
                room[b] -= tokens[i]
                load[b] += weights[i]
        where[~due] = spread(weights[~due], tokens[~due], len(room), room, load)
        return where

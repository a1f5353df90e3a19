"""Algorithm 1 of WLB-LLM (§4.3), unchanged."""

import numpy as np

from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.packing.packer import Arrivals, Packed, Packer
from torchtitan_wlb.packing.spans import NONE, group, lengths, longest_first


class WLBPaper(Packer):
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
        self.kept = [NONE] * (len(thresholds) + 1)  # the queues, then what was left over

    def pack(self, arrivals: Arrivals) -> Packed:
        *queues, left_over = self.kept
        drawn = arrivals.due()
        level = np.searchsorted(self.thresholds, lengths(drawn), side="right") - 1
        new = [drawn[level < 0]]
        for i, queue in enumerate(queues):
            queue = np.concatenate([queue, drawn[level == i]])
            leaving = self.n if len(queue) >= self.n or arrivals.ended else 0
            new.append(queue[:leaving])
            queues[i] = queue[leaving:]
        spans = np.concatenate([left_over, longest_first(np.concatenate(new))])
        where = self._place(spans)
        self.kept = [*queues, spans[where < 0]]
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

"""Algorithm 1 of WLB-LLM (§4.3), with one addition: documents leave when they must (deadline.py)."""

import numpy as np

from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.packing.deadline import Deadline
from torchtitan_wlb.packing.packer import Arrivals, Packed, Packer
from torchtitan_wlb.packing.spans import ARRIVAL, NONE, group, lengths, longest_first


class WLBPaper(Packer):
    """Algorithm 1 of WLB-LLM (§4.3): variable length, outlier queues, left-overs first.

    A document with L_i <= length < L_(i+1) waits in queue i, first in first out; a queue that holds n releases n
    together.

    Args:
        deadline: n micro-batches a step, the tokens that each may hold, and the longest delay.
        thresholds: L_1 < L_2 < ...; shorter documents do not wait.
    """

    def __init__(self, deadline: Deadline, thresholds: tuple[int, ...], cost: CostModel):
        self.deadline, self.n, self.capacity = deadline, deadline.n, deadline.capacity
        self.thresholds, self.cost = thresholds, cost
        self.kept = [NONE] * (len(thresholds) + 1)  # the queues, then what was left over

    def pack(self, arrivals: Arrivals) -> Packed:
        *queues, left_over = self.kept
        drawn = arrivals.due()
        due = self.deadline.due(np.concatenate([*self.kept, drawn]), arrivals.step)
        level = np.searchsorted(self.thresholds, lengths(drawn), side="right") - 1
        new = [drawn[level < 0]]
        for i, queue in enumerate(queues):
            queue = np.concatenate([queue, drawn[level == i]])
            leaving = np.arange(len(queue)) < (self.n if len(queue) >= self.n or arrivals.ended else 0)
            leaving |= queue[:, ARRIVAL] <= due
            new.append(queue[leaving])
            queues[i] = queue[~leaving]
        spans = np.concatenate([left_over, longest_first(np.concatenate(new))])
        where = self._place(spans)
        if (where[spans[:, ARRIVAL] <= due] < 0).any():
            where = self.deadline.place(spans, spans[:, ARRIVAL] <= due, self.cost.documents(lengths(spans)))
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

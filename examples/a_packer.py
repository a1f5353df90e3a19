"""A packer of one's own: this class, its name in `Packing.strategy` (config/method.py), and a line in `make_packer`
(packing/planner.py). Saving, resuming, logging and training follow."""

import numpy as np

from torchtitan_wlb.packing.greedy import spread
from torchtitan_wlb.packing.packer import Arrivals, Packed, Packer
from torchtitan_wlb.packing.spans import NONE, group, lengths, longest_first


class ByTokens(Packer):
    """Equal tokens in every micro-batch, longest documents first; what has no room is first in line next time."""

    def __init__(self, n: int, capacity: int):
        self.n, self.capacity, self.kept = n, capacity, [NONE]

    def pack(self, arrivals: Arrivals) -> Packed:
        spans = np.concatenate([*self.kept, longest_first(arrivals.due())])
        where = spread(lengths(spans), lengths(spans), self.n, self.capacity)
        self.kept = [spans[where < 0]]
        return group(spans[where >= 0], where[where >= 0], self.n)

"""What packing is for: the time of a step, by who waits for whom in the layout.

Data-parallel rank r trains its M micro-batches one after the other and waits for the slowest rank at the end of the
step. (Parameters are gathered once a step; where they are for every micro-batch, a rank waits in each, and all N count
as ranks of one: see layout_packing.py.) In a pipeline of PP ranks with v stages each, the others fill and drain
while the largest micro-batch passes, so

    seconds of a step = max over r of (sum of t + bubble x max of t)

with t the seconds of a micro-batch on all stages of a rank. `bubble` is read off the time model of the schedule for
equal micro-batches (parallelisms/schedules.py): (PP - 1) / v under 1F1B, GPipe and their looped kin, less where
backward is split. How well this ranks steps of unequal micro-batches: scripts/studies/study_objective.py.
"""

from dataclasses import dataclass

import numpy as np

from torchtitan_wlb.cost.cost_model import FROM_FILE


@dataclass(frozen=True)
class StepObjective:
    """The layout for which a step is packed.

    Attributes:
        dp: data-parallel ranks; rank r trains micro-batches r M to (r + 1) M - 1.
        bubble: how often the largest micro-batch of a rank counts again.
    """

    dp: int
    bubble: float

    __pydantic_config__ = FROM_FILE

    def __post_init__(self):
        if self.dp < 1 or self.bubble < 0:
            raise ValueError("dp must be positive, bubble not negative")

    def seconds(self, work: np.ndarray) -> float:
        """Of a step whose micro-batches, [N] in the order of the ranks, take `work`."""
        ranks = work.reshape(self.dp, -1)
        return float((ranks.sum(axis=1) + self.bubble * ranks.max(axis=1)).max())

    def perfect(self, work: np.ndarray) -> float:
        """The same with all micro-batches equal."""
        m = len(work) // self.dp
        return float(work.sum()) / self.dp * (1 + self.bubble / m)

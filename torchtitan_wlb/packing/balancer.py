"""The door for other trainers: lengths in, balanced micro-batches of document ids out. No torch, no configuration.

    for step in Balancer(lengths, micro_batches=16, window=131072, data_parallel=2, bubble=1.5):
        for rank, micro_batches in enumerate(step.ranks):
            ...                                  # each an array of document ids, whole documents

Every rank may run its own: equal arguments give equal steps. `state` of a step goes on exactly after it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.packing.document_order import DocumentOrder, Order, StreamOrder
from torchtitan_wlb.packing.objective import StepObjective
from torchtitan_wlb.packing.planner import StepPlanner
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.spans import ID


@dataclass
class BalancedStep:
    """One optimizer step.

    Attributes:
        ranks: for every data-parallel rank its micro-batches, each the ids [k] of its documents.
        work: the cost of each of them, as `ranks`.
        delay: steps that a token waited on average. waiting: documents that still do.
        state: to go on after this step, JSON.
    """

    ranks: list[list[np.ndarray]]
    work: list[list[float]]
    delay: float
    waiting: int
    state: dict[str, Any]


class FunctionCost(CostModel):
    """A cost model from a function of lengths [k] to costs [k]; what a token of a one-token document costs counts for
    padding."""

    function: Callable[[np.ndarray], np.ndarray]

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]):
        one = float(np.asarray(function(np.array([1])))[0])
        super().__init__(pair_flops=1.0, token_cost=one, knots=(1,), rates=(1.0,))
        object.__setattr__(self, "function", function)

    def attention(self, lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths)
        if not len(lengths):
            return np.zeros(0)
        return np.asarray(self.function(lengths), dtype=np.float64) - self.token_cost * lengths


class Balancer:
    """Packs documents of different length into steps that take as short as they can.

    Args:
        lengths: tokens of every document [n], drawn in a seeded shuffle; or an iterable of lengths without a len(),
            drawn in its order, ids counting from 0.
        micro_batches: of a step, over all data-parallel ranks.
        window: the longest document, in tokens.
        tokens: mean tokens of a micro-batch, the window without. Smaller ones shrink the bubble of a pipeline.
        max_tokens: of a micro-batch, 1.5 windows without; what memory holds.
        cost: a CostModel (`CostModel.of_equal_length(tokens)` for attention that costs as much as the rest at some
            length), or a function of lengths [k] to costs [k].
        data_parallel: ranks that wait for each other at the end of a step.
        bubble: of a pipeline, (PP - 1) / stages a rank; 0 without one.
        delay_price: how much balance may cost to train a waiting document now, see packing/wlb.py; lower balances
            better and delays more.
        max_delay: steps after which every document has been trained.
        epochs: passes over `lengths`, 0 for endless.
        state: `BalancedStep.state` to go on from.

    Raises:
        ValueError: numbers that no step can satisfy, or a state of other documents.
    """

    def __init__(
        self,
        lengths: np.ndarray | Iterable[int],
        *,
        micro_batches: int,
        window: int,
        cost: CostModel | Callable[[np.ndarray], np.ndarray],
        tokens: int = 0,
        max_tokens: int = 0,
        data_parallel: int = 1,
        bubble: float = 0.0,
        delay_price: float = 0.12,
        max_delay: int = 15,
        epochs: int = 1,
        seed: int = 0,
        state: dict[str, Any] | None = None,
    ):
        settings = PackingSettings(
            strategy="wlb", n=micro_batches, micro_batch_tokens=tokens or window, max_step_tokens_factor=0.0,
            objective=StepObjective(data_parallel, bubble), seq_len=window, seq_len_multiple=1,
            s_max=max_tokens or window * 3 // 2, thresholds=(), delay_price=delay_price, max_delay=max_delay, window=1,
            solver_nodes=1, in_flight=(0, 0), cost=cost if isinstance(cost, CostModel) else FunctionCost(cost),
            seed=seed, epochs=epochs,
        )  # fmt: skip
        if settings.s_max < window:
            raise ValueError(f"max_tokens {max_tokens}: a document of {window} tokens (window) must fit")
        if max_delay < (least := settings.deadline.least_delay()):
            raise ValueError(f"max_delay {max_delay}: must be at least {least}, or documents could wait longer")
        order: Order
        if hasattr(lengths, "__len__"):
            known = np.asarray(lengths, dtype=np.int64)
            if len(known) == 0 or known.min() < 1 or known.max() > window:
                raise ValueError(f"lengths must be 1 to {window} (window)")
            order = DocumentOrder([len(known)], [1.0], known.__getitem__, seed, epochs)
        else:
            order = StreamOrder(_checked(lengths, window))
        self._planner = StepPlanner(settings, order)
        if state:
            self._planner.restore(state)

    def __iter__(self) -> Iterator[BalancedStep]:
        return self

    def __next__(self) -> BalancedStep:
        plan, settings = next(self._planner), self._planner.settings
        hands = settings.deal(plan.work, plan.step, settings.objective.dp)
        return BalancedStep(
            ranks=[[plan.micro_batch(b)[:, ID] for b in hand] for hand in hands],
            work=[plan.work[hand].tolist() for hand in hands],
            delay=plan.delay[0],
            waiting=plan.waiting[0],
            state=plan.state,
        )


def _checked(lengths: Iterable[int], window: int) -> Iterator[int]:
    for i, length in enumerate(lengths):
        if not 1 <= length <= window:
            raise ValueError(f"document {i} has {length} tokens, not 1 to {window} (window)")
        yield int(length)

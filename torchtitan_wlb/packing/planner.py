"""Step plans: from the document order to N micro-batches of spans, with the state to go on exactly.

Everything here works on lengths and is computed identically on every rank: no communication, no token is read.
"""

import hashlib
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from torchtitan_wlb.cost.cost_model import imbalance
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.packing.baselines import Fixed, Plain, PlainWhole
from torchtitan_wlb.packing.document_order import Order
from torchtitan_wlb.packing.greedy import spread
from torchtitan_wlb.packing.packer import Arrivals, Packer
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.spans import ARRIVAL, ID, START, STOP, lengths
from torchtitan_wlb.packing.wlb import WLB
from torchtitan_wlb.packing.wlb_paper import WLBPaper


@dataclass
class StepPlan:
    """The micro-batches of one step, and what is worth logging about them.

    Attributes:
        step: counted from 1.
        spans, bounds: micro-batch b of N is spans[bounds[b] : bounds[b + 1]] (see spans.py).
        padded: [N] tokens of every micro-batch, padding included (rounded to seq_len_multiple, never to the layout).
        attention, work: [N] predicted seconds of every micro-batch in attention, and in all; padding costs linear
            work.
        arrived: documents drawn in this step.
        waiting: (documents, tokens, age of the oldest in steps) kept for later.
        delay: (token-weighted mean, maximum) over the trained spans of step - arrival.
        seconds: it took to plan.
        state: planner state after this step (JSON).
    """

    step: int
    spans: np.ndarray
    bounds: np.ndarray
    padded: np.ndarray
    attention: np.ndarray
    work: np.ndarray
    arrived: int
    waiting: tuple[int, int, int]
    delay: tuple[float, int]
    seconds: float
    state: dict[str, Any]

    def micro_batch(self, b: int) -> np.ndarray:
        """Spans [k, 4] of a micro-batch."""
        return self.spans[self.bounds[b] : self.bounds[b + 1]]

    @property
    def costs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a time model takes: seconds of attention and of everything else, and padded tokens, [N] each."""
        return self.attention, self.work - self.attention, self.padded

    @property
    def tokens(self) -> int:
        return int(lengths(self.spans).sum())

    @property
    def documents(self) -> int:
        """Documents trained; one that `plain` cut counts where it begins."""
        return int((self.spans[:, START] == 0).sum())

    @property
    def attended_pairs(self) -> int:
        d = lengths(self.spans)
        return int((d * (d + 1) // 2).sum())

    @property
    def imbalance(self) -> float:
        return imbalance(self.work)

    def hash(self) -> str:
        """12 hex digits over the spans of all micro-batches in planner order."""
        h = hashlib.blake2b(np.ascontiguousarray(self.bounds, dtype=np.int64).tobytes(), digest_size=6)
        h.update(np.ascontiguousarray(self.spans[:, [ID, START, STOP]]).tobytes())
        return h.hexdigest()


class StepPlanner:
    """Iterator of step plans.

    In step s documents are due until the running total reaches s x N x micro_batch_tokens, so the mean is exact, unless
    so many tokens wait that fewer must be drawn (deadline.py); the packer decides what is trained now and what waits.
    With `epochs`, ends after the last document has been trained.

    Args:
        settings: what decides packing.
        order: in which documents arrive.
    """

    def __init__(self, settings: PackingSettings, order: Order):
        self.settings, self.order = settings, order
        self.packer = make_packer(settings)
        self.step = 0
        self.given_up = 0  # tokens that were due and not drawn, because too many waited

    def __iter__(self):
        return self

    def __next__(self) -> StepPlan:
        began = time.perf_counter()
        s = self.settings
        if self.order.exhausted and not len(self.packer.waiting()):
            raise StopIteration
        self.step += 1
        due = self.step * s.n * s.micro_batch_tokens - sum(self.order.drawn_tokens) - self.given_up
        allowed = max(0, min(due, s.deadline.room - int(lengths(self.packer.waiting()).sum())))
        self.given_up += max(0, due - allowed)
        arrivals = Arrivals(self.order, self.step, allowed)
        spans, bounds = self.packer.pack(arrivals)
        if not len(spans) and self.order.exhausted and not len(self.packer.waiting()):
            raise StopIteration
        tokens = lengths(spans)
        micro_batch = np.repeat(np.arange(s.n), np.diff(bounds))
        held = np.bincount(micro_batch, tokens, s.n).astype(np.int64)
        padded = np.full(s.n, s.seq_len) if s.fixed_length else -(-held // s.seq_len_multiple) * s.seq_len_multiple
        age = self.step - spans[:, ARRIVAL]
        waiting = self.packer.waiting()
        attention = np.bincount(micro_batch, s.cost.attention(tokens), s.n)
        return StepPlan(
            step=self.step,
            spans=spans,
            bounds=bounds,
            padded=padded,
            attention=attention,
            work=attention + s.cost.token_cost * padded + s.cost.fixed_cost,
            arrived=arrivals.count,
            waiting=(
                len(waiting),
                int(lengths(waiting).sum()),
                int(np.max(self.step - waiting[:, ARRIVAL], initial=0)),
            ),
            delay=(float((age * tokens).sum()) / max(1, int(tokens.sum())), int(age.max(initial=0))),
            seconds=time.perf_counter() - began,
            state={
                "step": self.step,
                "order": self.order.state(),
                "packer": self.packer.state(),
                "given_up": self.given_up,
            },
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after the step whose plan carried this state.

        Raises:
            ConfigError: it is not a state of a planner on these documents.
        """
        self.step, self.given_up = state["step"], state["given_up"]
        try:
            self.order.restore(state["order"])
            self.packer.restore(state["packer"])
            self._check(self.packer.waiting())
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"--checkpoint.load_step: what waits for training does not fit the documents ({error}); choose another "
                "step"
            ) from error

    def _check(self, waiting: np.ndarray) -> None:
        id, start, stop, arrival = waiting.T
        if ((start < 0) | (stop <= start) | (stop > self.order.tokens_of(id))).any():
            raise ValueError("tokens that a document does not have")
        if ((arrival < 1) | (arrival > self.step)).any():
            raise ValueError("a document from a step to come")
        drawn = sum(self.order.drawn_tokens)
        if int(lengths(waiting).sum()) > drawn:
            raise ValueError("more tokens than were drawn")
        s = self.settings
        if drawn > (self.step + s.window) * s.n * s.micro_batch_tokens + s.seq_len:
            raise ValueError("more tokens drawn than were due")


def make_packer(s: PackingSettings) -> Packer:
    if s.strategy == "plain":
        return Plain(s.n, s.seq_len)
    if s.strategy == "plain_whole":
        return PlainWhole(s.n, s.seq_len)
    if s.strategy == "fixed":
        return Fixed(s.deadline, s.window, spread)
    if s.strategy == "fixed_solver":
        from torchtitan_wlb.packing.solver import assign_exactly

        return Fixed(s.deadline, s.window, partial(assign_exactly, nodes=s.solver_nodes))
    if s.strategy == "wlb_paper":
        return WLBPaper(s.deadline, s.thresholds, s.cost)
    return WLB(
        s.deadline,
        s.objective,
        s.micro_batch_tokens,
        s.s_max,
        s.cost,
        in_flight=s.in_flight,
        multiple=s.seq_len_multiple,
        delay_price=s.delay_price,
        max_step_tokens=s.max_step_tokens,
    )

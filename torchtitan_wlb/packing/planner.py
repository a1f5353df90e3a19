"""Step plans: from the document order to N micro-batches of spans, with the state to go on exactly.

Everything here works on lengths and is computed identically on every rank. `PackingSettings` is what decides which
document goes where; it is resolved at the first step of a run, stored in the checkpoint and reused on resume, whatever
the layout.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from torchtitan_wlb.config import ConfigError, Packing, Training
from torchtitan_wlb.data.sampler import DocumentOrder
from torchtitan_wlb.packing.cost_model import CostModel, imbalance
from torchtitan_wlb.packing.outlier_queue import Span
from torchtitan_wlb.packing.packers import Packer, Plain, WLBPaper


@dataclass(frozen=True)
class PackingSettings:
    """Everything besides the documents that decides packing. None of it depends on the layout or, after the first step,
    on the device."""

    strategy: str
    n: int
    seq_len: int
    seq_len_multiple: int
    s_max: int
    thresholds: tuple[int, ...]
    pair_cost: float
    token_cost: float
    seed: int
    epochs: int
    documents: str

    @property
    def cost(self) -> CostModel:
        return CostModel(self.pair_cost, self.token_cost)

    @property
    def balances(self) -> bool:
        """Whether the strategy sorts micro-batches over data-parallel ranks."""
        return self.strategy != "plain"

    def hash(self) -> str:
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:12]


def resolve_settings(
    training: Training, packing: Packing, *, seed: int, default_n: int, cost: CostModel, documents: str
) -> PackingSettings:
    """Settings of a fresh run.

    Args:
        default_n: micro-batches a step where training.global_batch_size is -1.
        cost: coefficients to freeze.
        documents: fingerprint of all document lengths.
    """
    return PackingSettings(
        strategy=packing.strategy,
        n=default_n if training.global_batch_size == -1 else training.global_batch_size,
        seq_len=training.seq_len,
        seq_len_multiple=training.seq_len_multiple,
        s_max=int(packing.max_len_factor * training.seq_len),
        thresholds=packing.outlier_thresholds or (training.seq_len * 5 // 16, training.seq_len * 10 // 16),
        pair_cost=cost.pair_cost,
        token_cost=cost.token_cost,
        seed=seed,
        epochs=training.epochs,
        documents=documents,
    )


_FLAGS = {
    "strategy": "packing.strategy",
    "n": "training.global_batch_size",
    "seq_len": "training.seq_len",
    "seq_len_multiple": "training.seq_len_multiple",
    "s_max": "packing.max_len_factor (x training.seq_len)",
    "thresholds": "packing.outlier_thresholds",
    "pair_cost": "cost_model.device",
    "token_cost": "cost_model.device",
    "seed": "debug.seed",
    "epochs": "training.epochs",
    "documents": "training.dataset (fingerprint of all document lengths)",
}


def reconcile(stored: dict[str, Any], configured: PackingSettings, resolved_only: set[str]) -> PackingSettings:
    """Settings of a resumed run: the stored ones, if the configuration does not ask for others.

    Args:
        stored: settings of the checkpoint, as saved by `asdict`.
        configured: settings as a fresh run would resolve them.
        resolved_only: fields that the configuration leaves to be resolved (such as n = -1); they are taken as stored.

    Raises:
        ConfigError: every field that was configured differently, with both values and the flag.
    """
    kept = PackingSettings(**(stored | {"thresholds": tuple(stored["thresholds"])}))
    differ = [
        f"--{_FLAGS[f.name]}: the checkpoint was made with {getattr(kept, f.name)}, "
        f"configured is {getattr(configured, f.name)}"
        for f in fields(PackingSettings)
        if f.name not in resolved_only and getattr(kept, f.name) != getattr(configured, f.name)
    ]
    if differ:
        raise ConfigError("on resume nothing that decides which document goes where can change:", *differ)
    return kept


@dataclass
class StepPlan:
    """The micro-batches of one step, and what is worth logging about them.

    Attributes:
        step: counted from 1.
        micro_batches: N lists of spans in planner order.
        work: predicted seconds of every micro-batch, padding not included.
        arrived: documents drawn in this step.
        waiting: (documents, tokens, age of the oldest in steps) kept for later.
        delay: (token-weighted mean, maximum) over the trained spans of step - arrival.
        state: planner state after this step (JSON).
    """

    step: int
    micro_batches: list[list[Span]]
    work: list[float]
    arrived: int
    waiting: tuple[int, int, int]
    delay: tuple[float, int]
    plan_seconds: float
    state: dict[str, Any]

    @property
    def tokens(self) -> int:
        return sum(span.length for mb in self.micro_batches for span in mb)

    @property
    def documents(self) -> int:
        return sum(len(mb) for mb in self.micro_batches)

    @property
    def attended_pairs(self) -> int:
        return sum(span.length * (span.length + 1) // 2 for mb in self.micro_batches for span in mb)

    @property
    def imbalance(self) -> float:
        return imbalance(self.work)

    def hash(self) -> str:
        """12 hex digits over the spans of all micro-batches in planner order."""
        h = hashlib.blake2b(digest_size=6)
        for mb in self.micro_batches:
            h.update(np.array([(len(mb), 0, 0), *((s.id, s.start, s.stop) for s in mb)], dtype=np.int64).tobytes())
        return h.hexdigest()


class StepPlanner:
    """Iterator of step plans.

    Step s draws whole documents until the running total reaches s x N x seq_len tokens, so the mean is exact; the
    packer decides what is trained now and what waits. With `epochs`, ends after the last document has been trained.
    """

    def __init__(self, settings: PackingSettings, sizes: list[int], weights: list[float], lengths: Callable):
        self.settings = settings
        self.order = DocumentOrder(sizes, weights, lengths, settings.seed, settings.epochs)
        self.packer = make_packer(settings)
        self.step = 0
        self.arrived_tokens = 0

    def __iter__(self):
        return self

    def __next__(self) -> StepPlan:
        began = time.perf_counter()
        s = self.settings
        self.step += 1
        arrivals: list[Span] = []
        ended = False
        while self.arrived_tokens < self.step * s.n * s.seq_len:
            drawn = self.order.next()
            if drawn is None:
                ended = True
                break
            id, length = drawn
            arrivals.append(Span(id, 0, length, self.step))
            self.arrived_tokens += length
        if ended and not arrivals and next(self.packer.waiting(), None) is None:
            raise StopIteration
        micro_batches = self.packer.pack(arrivals, ended)
        cost = s.cost
        work = [sum(cost.document(span.length) for span in mb) for mb in micro_batches]
        waiting = list(self.packer.waiting())
        spans = [span for mb in micro_batches for span in mb]
        tokens = sum(span.length for span in spans)
        delay_mean = sum(span.length * (self.step - span.arrival) for span in spans) / max(tokens, 1)
        return StepPlan(
            step=self.step,
            micro_batches=micro_batches,
            work=work,
            arrived=len(arrivals),
            waiting=(
                len(waiting),
                sum(span.length for span in waiting),
                max((self.step - span.arrival for span in waiting), default=0),
            ),
            delay=(delay_mean, max((self.step - span.arrival for span in spans), default=0)),
            plan_seconds=time.perf_counter() - began,
            state=self.state(),
        )

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "arrived_tokens": self.arrived_tokens,
            "order": self.order.state(),
            "packer": self.packer.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after the step whose plan carried this state."""
        self.step, self.arrived_tokens = state["step"], state["arrived_tokens"]
        self.order.restore(state["order"])
        self.packer.restore([[Span(*span) for span in queue] for queue in state["packer"]])


def mean_imbalance(planner: StepPlanner, first_step: int, last_step: int) -> float:
    """Mean predicted imbalance of the micro-batches of steps first_step .. last_step; plans from step 1, lengths
    only."""
    values = []
    for plan in planner:
        if plan.step >= first_step:
            values.append(plan.imbalance)
        if plan.step >= last_step:
            break
    return float(np.mean(values)) if values else 1.0


def make_packer(s: PackingSettings) -> Packer:
    if s.strategy == "plain":
        return Plain(s.n, s.seq_len)
    return WLBPaper(s.n, s.s_max, s.seq_len_multiple, s.thresholds, s.cost)

"""What decides packing: resolved once at the first step of a run, stored in the checkpoint, reused on resume whatever
the layout."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace

import numpy as np

from torchtitan_wlb.config import Packing, Training
from torchtitan_wlb.cost.cost_model import FROM_FILE, CostModel
from torchtitan_wlb.packing.deadline import Deadline
from torchtitan_wlb.packing.greedy import deal
from torchtitan_wlb.packing.objective import StepObjective


@dataclass(frozen=True)
class PackingSettings:
    """Everything besides the documents that decides which document goes where.

    Attributes:
        n: micro-batches a step, over all ranks.
        micro_batch_tokens: mean tokens of a micro-batch; a step draws n times as many.
        max_step_tokens_factor: so many times its mean tokens wlb trains in a step at most, 0 for no limit.
        objective: what wlb packs for.
        seq_len: context window, the longest document.
        s_max: tokens of the longest micro-batch, a multiple of seq_len_multiple.
        thresholds: of wlb_paper. delay_price, max_delay: of wlb. window, solver_nodes: of fixed and fixed_solver.
        in_flight: (micro-batches, tokens) that so many together may hold; (0, 0) for no such limit.
        cost: workload model, frozen.
    """

    strategy: str
    n: int
    micro_batch_tokens: int
    max_step_tokens_factor: float
    objective: StepObjective
    seq_len: int
    seq_len_multiple: int
    s_max: int
    thresholds: tuple[int, ...]
    delay_price: float
    max_delay: int
    window: int
    solver_nodes: int
    in_flight: tuple[int, int]
    cost: CostModel
    seed: int
    epochs: int

    __pydantic_config__ = FROM_FILE

    def __post_init__(self):
        counts = (
            self.n,
            self.micro_batch_tokens,
            self.seq_len_multiple,
            self.s_max,
            self.max_delay,
            self.window,
            self.solver_nodes,
        )
        if min(*counts, self.seq_len - 1) <= 0:
            raise ValueError("counts and lengths must be positive")
        if self.n % self.objective.dp:
            raise ValueError(f"{self.n} micro-batches on {self.objective.dp} ranks")

    @property
    def max_step_tokens(self) -> int:
        """Tokens that wlb trains in a step at most, 0 for no limit."""
        return int(self.max_step_tokens_factor * self.n * self.micro_batch_tokens)

    @property
    def balances(self) -> bool:
        """Whether micro-batches are sorted over data-parallel ranks."""
        return self.strategy not in ("plain", "plain_whole")

    @property
    def fixed_length(self) -> bool:
        """Whether every micro-batch is padded to the context window."""
        return self.strategy in ("plain", "plain_whole", "fixed", "fixed_solver")

    @property
    def deadline(self) -> Deadline:
        """How long documents may wait, and how many, with what every micro-batch may hold whatever the others do."""
        capacity = self.seq_len if self.fixed_length else self.s_max
        if self.strategy == "wlb" and self.in_flight[0]:
            share = self.in_flight[1] // self.in_flight[0]
            capacity = min(capacity, share // self.seq_len_multiple * self.seq_len_multiple)
        return Deadline(self.n, capacity, self.max_delay, self.seq_len)

    def split(self, k: int) -> "PackingSettings":
        """The same tokens a step, in k micro-batches for every window of them."""
        windows = max(1, self.n * self.micro_batch_tokens // self.seq_len)
        return replace(self, n=k * windows, micro_batch_tokens=self.seq_len // k)

    def deal(self, work: np.ndarray, step: int, dp: int) -> list[list[int]]:
        """The micro-batches of a step, [N] work each, that every one of dp data-parallel ranks trains."""
        return deal(work.tolist(), dp, step, sort=self.sorts_over(dp))

    def sorts_over(self, dp: int) -> bool:
        """Whether micro-batches are dealt to data-parallel ranks by work: where the packer has not done so for as
        many."""
        return self.balances and not (self.strategy == "wlb" and dp == self.objective.dp)

    def describe(self) -> str:
        """One line for the log: the strategy with the parameters that it uses."""
        used = {
            "wlb": f", S_max {self.s_max}, delay_price {self.delay_price:.3g}, max_delay {self.max_delay}",
            "wlb_paper": f", S_max {self.s_max}, thresholds {self.thresholds}",
            "fixed": f", window {self.window}",
            "fixed_solver": f", window {self.window}, {self.solver_nodes} nodes",
        }.get(self.strategy, "")
        equal = f"attention costs as much as the rest at {self.cost.equal_length():,.0f} tokens"
        mean = "" if self.micro_batch_tokens == self.seq_len else f" of {self.micro_batch_tokens} tokens"
        return f"packing {self.strategy}: N {self.n}{mean}, window {self.seq_len}{used}; {equal}"

    def hash(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


_FLAGS = {
    "strategy": "packing.strategy",
    "n": "training.global_batch_size",
    "micro_batch_tokens": "training.micro_batch_tokens",
    "max_step_tokens_factor": "packing.max_step_tokens_factor",
    "seq_len": "training.seq_len",
    "seq_len_multiple": "training.seq_len_multiple",
    "s_max": "packing.max_len_factor (x training.seq_len)",
    "thresholds": "packing.outlier_thresholds",
    "delay_price": "packing.delay_price",
    "max_delay": "packing.max_delay_steps",
    "window": "packing.window",
    "solver_nodes": "packing.solver_nodes",
    "in_flight": "packing.max_tokens_in_flight",
    "seed": "debug.seed",
    "epochs": "training.epochs",
}


def resolve_settings(
    training: Training,
    packing: Packing,
    *,
    n: int,
    objective: StepObjective,
    alive: int = 1,
    seed: int,
    cost: CostModel,
) -> PackingSettings:
    """Settings of a fresh run. What is "auto" stays open: thresholds () and delay_price 0, for tuning.tune.

    Args:
        n: micro-batches a step, of a window each where training.micro_batch_tokens is "auto" (`split` makes others).
        objective: of the layout.
        alive: micro-batches a rank holds at once; so many share packing.max_tokens_in_flight.
        cost: workload model to freeze.
    """
    multiple, mean = training.length_multiple, training.micro_batch_tokens
    budget = packing.max_tokens_in_flight
    return PackingSettings(
        strategy=packing.strategy,
        n=n,
        micro_batch_tokens=training.seq_len if mean in (-1, "auto") else int(mean),
        max_step_tokens_factor=packing.max_step_tokens_factor,
        objective=objective,
        seq_len=training.seq_len,
        seq_len_multiple=multiple,
        s_max=int(packing.max_len_factor * training.seq_len) // multiple * multiple,
        thresholds=() if packing.outlier_thresholds == "auto" else packing.outlier_thresholds,
        delay_price=0.0 if packing.delay_price == "auto" else packing.delay_price,
        max_delay=packing.max_delay_steps,
        window=packing.window,
        solver_nodes=packing.solver_nodes,
        in_flight=(alive, budget) if budget else (0, 0),
        cost=cost,
        seed=seed,
        epochs=training.epochs,
    )


def fields_left_open(training: Training, packing: Packing) -> set[str]:
    """Settings that a configuration leaves to be resolved; a resumed run takes them from its checkpoint."""
    left = {"n"} if training.global_batch_size == -1 else set()
    left |= {"micro_batch_tokens"} if training.micro_batch_tokens in (-1, "auto") else set()
    left |= {"n"} if training.micro_batch_tokens == "auto" else set()
    left |= {"seq_len_multiple"} if training.seq_len_multiple == -1 else set()
    left |= {"thresholds"} if packing.outlier_thresholds == "auto" else set()
    left |= {"delay_price"} if packing.delay_price == "auto" else set()
    return left


def differences(
    kept: PackingSettings,
    configured: PackingSettings,
    left_open: set[str],
    made_with: str = "the checkpoint was made with",
) -> list[str]:
    """What a run asks for that the settings it goes on with do not have, in config words. Costs and objective are not
    compared: they follow from a device, a profile and the layout of the first start.

    Args:
        kept: of the checkpoint. configured: as a fresh run would resolve them.
        left_open: fields that the configuration leaves to be resolved (such as n = -1).
    """
    if kept.in_flight[1] == configured.in_flight[1]:  # how many share it follows the layout of the first start
        configured = replace(configured, in_flight=kept.in_flight)
    return [
        f"--{flag}: {made_with} {getattr(kept, name)}, configured is {getattr(configured, name)}; packing cannot change"
        for name, flag in _FLAGS.items()
        if name not in left_open and getattr(kept, name) != getattr(configured, name)
    ]

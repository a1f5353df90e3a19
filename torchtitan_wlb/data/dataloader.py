"""From step plans to the micro-batches that this rank trains, made ahead in loader processes.

Every worker plans every step (planning needs lengths only and costs little) and builds tensors of its own steps: worker
w of W those with step % W == w. Every item carries the planner's state after its step; the training loop saves that of
the last step it trained, so a resume may change the number of workers or the layout. torch's own DataLoader is enough
for that: a stateful loader would tie its state to the worker count.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchtitan_wlb.data.documents import Documents
from torchtitan_wlb.data.micro_batch import Layout, MicroBatch, build_micro_batch, padded_length
from torchtitan_wlb.packing.packers import deal
from torchtitan_wlb.packing.planner import StepPlan, StepPlanner
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.simulation.step_time import StepTime


@dataclass
class StepBatch:
    """One step of one rank.

    Attributes:
        micro_batches: the M micro-batches of this data-parallel rank, in training order.
        n_targets: valid labels of the whole step over all ranks.
        plan_hash: hash of the plan, equal on all ranks.
        stats: plan statistics for the log, over all ranks.
        cp_work: predicted seconds of the (slowest, average) context-parallel rank, summed over these micro-batches.
        step_time: predicted step of this data-parallel rank.
        cp_sharding: {shard plan: number} of these micro-batches.
        state: planner state after this step.
    """

    micro_batches: list[MicroBatch]
    n_targets: int
    plan_hash: str
    stats: dict
    cp_work: tuple[float, float]
    step_time: StepTime
    cp_sharding: dict[str, int]
    state: dict

    def pin_memory(self) -> "StepBatch":
        for mb in self.micro_batches:
            mb.pin_memory()
        return self


class StepDataset(IterableDataset):
    """Plans and builds the steps of one rank.

    Args:
        documents: lengths for the planner, tokens for the spans of this rank.
        settings: what decides packing.
        layout: what decides who trains what.
        state: planner state to go on from, None for the first step.
    """

    def __init__(self, documents: Documents, settings: PackingSettings, layout: Layout, state: dict | None = None):
        self.documents, self.settings, self.layout, self.start_state = documents, settings, layout, state

    def __iter__(self) -> Iterator[StepBatch]:
        info = get_worker_info()
        worker, n_workers = (info.id, info.num_workers) if info else (0, 1)
        planner = make_planner(self.documents, self.settings)
        if self.start_state:
            planner.restore(self.start_state)
        for i, plan in enumerate(planner):
            if i % n_workers == worker:
                yield self._build(plan)

    def _build(self, plan: StepPlan) -> StepBatch:
        s, layout, documents = self.settings, self.layout, self.documents
        hands = deal(plan.work.tolist(), layout.dp, plan.step, sort=s.balances)
        padded = [padded_length(t, layout.cp, layout.tp, s.seq_len_multiple) for t in plan.padded.tolist()]
        micro_batches = [
            build_micro_batch(plan.micro_batch(b), documents, layout, s.seq_len_multiple, int(plan.padded[b]))
            for b in hands[layout.dp_rank]
        ]
        kinds = Counter(mb.attention.kind for mb in micro_batches)
        # Costs are those of the average context-parallel rank; attention of the slowest one takes longer.
        average = np.array([s.cost.attention(np.array(mb.lengths)).sum() for mb in micro_batches])
        slowest = average * [mb.cp_attention[0] / mb.cp_attention[1] for mb in micro_batches]
        tokens = np.array([mb.n_tokens for mb in micro_batches])
        linear = s.cost.token_cost * tokens + s.cost.fixed_cost
        order = list(range(len(micro_batches)))
        if s.balances:
            order = layout.step_model.choose_order(slowest, linear, tokens)
        return StepBatch(
            micro_batches=[micro_batches[i] for i in order],
            n_targets=documents.count_targets(plan.spans),
            plan_hash=plan.hash(),
            stats={
                "tokens": plan.tokens,
                "docs": plan.documents,
                "attended_pairs": plan.attended_pairs,
                "pad_fraction": 1 - plan.tokens / sum(padded),
                "imbalance_micro_batch": plan.imbalance,
                "delay_mean_steps": plan.delay[0],
                "delay_max_steps": plan.delay[1],
                "queue_docs": plan.waiting[0],
                "queue_tokens": plan.waiting[1],
                "queue_age_max_steps": plan.waiting[2],
                "plan_ms": plan.seconds * 1e3,
            },
            cp_work=(float((slowest + linear).sum()), float((average + linear).sum())),
            step_time=layout.step_model.predict(slowest[order], linear[order], tokens[order]),
            cp_sharding=dict(kinds),
            state=plan.state,
        )


def make_planner(documents: Documents, settings: PackingSettings) -> StepPlanner:
    return StepPlanner(settings, documents.sizes, documents.weights, documents.lengths)


def build_dataloader(dataset: StepDataset, num_workers: int, pin_memory: bool) -> DataLoader:
    """Loader of StepBatch items. Iterate it before CUDA and process groups start: workers are forked from a clean
    server."""
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=2 if num_workers else None,
        multiprocessing_context="forkserver" if num_workers else None,
        worker_init_fn=_single_thread if num_workers else None,
        pin_memory=pin_memory,
    )


def _single_thread(_: int) -> None:
    torch.set_num_threads(1)

"""From a step plan to what this rank trains: its micro-batches as tensors, in the order that its pipeline likes best.

StepPlan (N micro-batches of spans, equal on all ranks)
  ──► deal: the M of this data-parallel rank ──► shard plan of each ──► tokens of this rank's part
  ──► order of the micro-batches with the shortest predicted step
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from torchtitan_wlb.context_parallel.selection import attention_seconds, choose_plan, latency
from torchtitan_wlb.context_parallel.shard_plan import ShardPlan
from torchtitan_wlb.cost.kernel_cost import KernelCost
from torchtitan_wlb.cost.step_time import StepModel, StepTime
from torchtitan_wlb.data.documents import Documents
from torchtitan_wlb.data.micro_batch import MicroBatch, pack_documents, padded_length
from torchtitan_wlb.loss import IGNORE_INDEX
from torchtitan_wlb.packing.planner import StepPlan
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.spans import ID, START, STOP
from torchtitan_wlb.packing.spans import lengths as span_lengths


@dataclass(frozen=True)
class Layout:
    """What of the layout decides who trains what: degrees, this rank's coordinates, how micro-batches are sharded over
    context-parallel ranks and how long the pipeline takes for them."""

    dp: int
    dp_rank: int
    cp: int
    cp_rank: int
    tp: int
    tp_rank: int
    sharding: str
    kernel_cost: KernelCost
    step_model: StepModel

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is counted: tensor-parallel ranks hold the same one."""
        return self.tp_rank == 0


@dataclass
class StepBatch:
    """One step of one rank.

    Attributes:
        micro_batches: the M micro-batches of this data-parallel rank, in training order.
        n_targets: valid labels of the whole step over all ranks.
        plan_hash: hash of the plan, equal on all ranks.
        documents: [k] ids of the documents of the whole step.
        stats: plan statistics for the log, over all ranks.
        cp_work: predicted seconds of the (slowest, average) context-parallel rank, summed over these micro-batches.
        step_time: predicted step of this data-parallel rank.
        cp_sharding: {shard plan: number} of these micro-batches.
        state: planner state after this step.
    """

    micro_batches: list[MicroBatch]
    n_targets: int
    plan_hash: str
    documents: np.ndarray
    stats: dict
    cp_work: tuple[float, float]
    step_time: StepTime
    cp_sharding: dict[str, int]
    state: dict

    def pin_memory(self) -> "StepBatch":
        return replace(self, micro_batches=[mb.pin_memory() for mb in self.micro_batches])


class StepBuilder:
    """Builds this rank's part of a step.

    Args:
        documents: tokens of the spans. Read from any thread.
        settings: what decided packing.
        layout: what decides who trains what.
    """

    def __init__(self, documents: Documents, settings: PackingSettings, layout: Layout):
        self.documents, self.settings, self.layout = documents, settings, layout

    def __call__(self, plan: StepPlan) -> StepBatch:
        s, layout = self.settings, self.layout
        hands = s.deal(plan.work, plan.step, layout.dp)
        padded = [padded_length(t, layout.cp, layout.tp, s.seq_len_multiple) for t in plan.padded.tolist()]
        built = [self.micro_batch(plan.micro_batch(b), int(plan.padded[b])) for b in hands[layout.dp_rank]]
        micro_batches = [mb for mb, _ in built]
        # Costs are those of the average context-parallel rank; attention of the slowest one takes longer.
        average = np.array([s.cost.attention(np.array(mb.lengths)).sum() for mb in micro_batches])
        factors = np.array([_over_average(shards, layout.kernel_cost) for _, shards in built])
        slowest, exchanged = average * factors.T
        tokens = np.array([mb.n_tokens for mb in micro_batches])
        linear = s.cost.token_cost * tokens + s.cost.fixed_cost
        order = list(range(len(micro_batches)))
        if s.balances:
            order = layout.step_model.choose_order(exchanged, linear, tokens)
        return StepBatch(
            micro_batches=[micro_batches[i] for i in order],
            n_targets=self.documents.count_targets(plan.spans),
            plan_hash=plan.hash(),
            documents=plan.spans[:, ID],
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
            step_time=layout.step_model.predict(exchanged[order], linear[order], tokens[order]),
            cp_sharding=dict(Counter(mb.sharding for mb in micro_batches)),
            state=plan.state,
        )

    def micro_batch(self, spans: np.ndarray, at_least: int = 0) -> tuple[MicroBatch, ShardPlan]:
        """Read the tokens of some spans [k, 4], pack them, and keep this rank's part; no span gives one minimal
        micro-batch of padding.

        Args:
            at_least: tokens to pad to (strategies of fixed length).
        """
        layout, documents = self.layout, self.documents
        lengths = span_lengths(spans).tolist()
        multiple = self.settings.seq_len_multiple
        n_tokens = padded_length(max(at_least, sum(lengths)), layout.cp, layout.tp, multiple)
        shards = choose_plan(lengths, n_tokens, layout.cp, layout.sharding, layout.kernel_cost)
        parts = spans[:, [ID, START, STOP]].tolist()
        tokens = [documents.tokens(*part) for part in parts]
        labels = [documents.labels(id, start, stop, IGNORE_INDEX) for id, start, stop in parts]
        return pack_documents(tokens, labels, shards, layout.cp_rank), shards


def _over_average(shards: ShardPlan, kernel_cost: KernelCost) -> tuple[float, float]:
    """Predicted time of the slowest context-parallel rank in attention, without and with the exchange, over the average
    one's attention."""
    if shards.cp == 1 or not shards.lengths:
        return 1.0, 1.0
    seconds = attention_seconds(shards, kernel_cost)
    return float(seconds.max() / seconds.mean()), latency(shards, kernel_cost) / float(seconds.mean())

"""Tensors of one micro-batch on one context-parallel rank, and the metadata that attention needs.

T: padded tokens of the micro-batch. D: documents. Tensors are [1, T/CP] in the local order of the shard plan.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from torchtitan_wlb.context_parallel.selection import choose_plan
from torchtitan_wlb.context_parallel.shard_plan import ShardPlan
from torchtitan_wlb.data.documents import Documents
from torchtitan_wlb.packing.spans import ID, START, STOP
from torchtitan_wlb.packing.spans import lengths as span_lengths

IGNORE_INDEX = -100


@dataclass
class AttentionMeta:
    """Who attends to what on this rank; plain ints, apart from one index tensor.

    Attributes:
        segments: (q_start, q_stop, k_start, k_stop), queries in local order, keys in packed order.
        gathered_index: [T] int64, where packed token t stands in the K/V gathered from all ranks; None without CP.
        kind: shard plan it came from.
    """

    segments: list[tuple[int, int, int, int]]
    gathered_index: torch.Tensor | None = None
    kind: str = "whole"

    def to(self, device) -> "AttentionMeta":
        index = self.gathered_index
        return self if index is None else replace(self, gathered_index=index.to(device, non_blocking=True))


@dataclass
class MicroBatch:
    """One packed sequence, the part of one context-parallel rank.

    Attributes:
        tokens, labels, positions: int64 [1, T/CP]; labels are shifted inside their document, IGNORE_INDEX where there
            is none; positions count from 0 in every document.
        attention: see AttentionMeta.
        lengths: tokens of the documents, in packed order.
        n_tokens: T.
        cp_pairs: (largest, mean) attended pairs over context-parallel ranks.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMeta
    lengths: list[int] = field(default_factory=list)
    n_tokens: int = 0
    cp_pairs: tuple[float, float] = (0.0, 0.0)

    def to(self, device) -> "MicroBatch":
        moved = {k: getattr(self, k).to(device, non_blocking=True) for k in ("tokens", "labels", "positions")}
        return replace(self, attention=self.attention.to(device), **moved)

    def pin_memory(self) -> "MicroBatch":
        self.tokens, self.labels, self.positions = (t.pin_memory() for t in (self.tokens, self.labels, self.positions))
        return self


def padded_length(tokens: int, cp: int, tp: int, multiple: int) -> int:
    """Smallest legal T for some tokens: a multiple of CP x lcm(2, TP) and of seq_len_multiple, at least one unit."""
    unit = math.lcm(cp * math.lcm(2, tp), multiple)
    return max(1, -(-tokens // unit)) * unit


def pack_documents(tokens: list[np.ndarray], labels: list[np.ndarray], plan: ShardPlan, cp_rank: int) -> MicroBatch:
    """Lay documents end to end, pad, and keep the tokens that a context-parallel rank owns.

    Args:
        tokens, labels: of every document, [d] each.
        plan: shard plan over the lengths of these documents.
        cp_rank: whose part.
    """
    total = plan.n_tokens
    padding = total - sum(plan.lengths)
    packed_tokens = np.concatenate([*tokens, np.zeros(padding, np.int64)]).astype(np.int64)
    packed_labels = np.concatenate([*labels, np.full(padding, IGNORE_INDEX)]).astype(np.int64)
    positions = np.concatenate([*(np.arange(d) for d in plan.lengths), np.zeros(padding, np.int64)]).astype(np.int64)
    index = plan.token_index(cp_rank)
    per_rank = plan.attended_pairs()
    return MicroBatch(
        tokens=torch.from_numpy(packed_tokens[index])[None],
        labels=torch.from_numpy(packed_labels[index])[None],
        positions=torch.from_numpy(positions[index])[None],
        attention=AttentionMeta(
            segments=[tuple(s) for s in plan.segments(cp_rank).tolist()],
            gathered_index=torch.from_numpy(plan.gathered_index()) if plan.cp > 1 else None,
            kind=plan.kind,
        ),
        lengths=list(plan.lengths),
        n_tokens=total,
        cp_pairs=(float(per_rank.max()), float(per_rank.mean())),
    )


@dataclass(frozen=True)
class Layout:
    """What of the layout the loader must know: degrees, my coordinates, how micro-batches are sharded."""

    dp: int
    dp_rank: int
    cp: int
    cp_rank: int
    tp: int
    tp_rank: int
    sharding: str
    tile: int

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is counted: tensor-parallel ranks hold the same one."""
        return self.tp_rank == 0


def build_micro_batch(
    spans: np.ndarray, documents: Documents, layout: Layout, multiple: int, at_least: int = 0
) -> MicroBatch:
    """Read the tokens of some spans [k, 4] and pack them; no span gives one minimal micro-batch of padding.

    Args:
        multiple: training.seq_len_multiple. at_least: tokens to pad to (strategies of fixed length).
    """
    lengths = span_lengths(spans).tolist()
    n_tokens = padded_length(max(at_least, sum(lengths)), layout.cp, layout.tp, multiple)
    plan = choose_plan(lengths, n_tokens, layout.cp, layout.sharding, layout.tile)
    parts = spans[:, [ID, START, STOP]].tolist()
    tokens = [documents.tokens(*part) for part in parts]
    labels = [documents.labels(id, start, stop, IGNORE_INDEX) for id, start, stop in parts]
    return pack_documents(tokens, labels, plan, layout.cp_rank)

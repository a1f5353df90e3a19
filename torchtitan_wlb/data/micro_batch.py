"""Tensors of one micro-batch on one context-parallel rank, and the metadata that attention needs.

T: padded tokens of the micro-batch. D: documents. Tensors are [1, T/CP] in the local order of the shard plan.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from torchtitan_wlb.context_parallel.exchange import plan_exchange
from torchtitan_wlb.context_parallel.kernel_cost import KernelCost
from torchtitan_wlb.context_parallel.selection import attention_seconds, choose_plan
from torchtitan_wlb.context_parallel.shard_plan import ShardPlan
from torchtitan_wlb.packing.spans import ID, START, STOP
from torchtitan_wlb.packing.spans import lengths as span_lengths
from torchtitan_wlb.simulation.step_time import StepModel

if TYPE_CHECKING:  # attention needs this file, but not the packages that read documents
    from torchtitan_wlb.data.documents import Documents

IGNORE_INDEX = -100


@dataclass
class ExchangeMeta:
    """K/V exchange of this rank as tensors; context_parallel/exchange.py says what each is.

    Attributes:
        segments: (q_start, q_stop, k_start, k_stop) with keys among the n_remote remote keys.
        send_index, recv_position, own_index, own_position: int64.
        send_splits, recv_splits: tokens to and from every context-parallel rank.
    """

    segments: list[tuple[int, int, int, int]]
    n_remote: int
    send_index: torch.Tensor
    recv_position: torch.Tensor
    own_index: torch.Tensor
    own_position: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]

    def to(self, device) -> "ExchangeMeta":
        names = ("send_index", "recv_position", "own_index", "own_position")
        return replace(self, **{k: getattr(self, k).to(device, non_blocking=True) for k in names})


@dataclass
class AttentionMeta:
    """Who attends to what on this rank.

    Attributes:
        segments: (q_start, q_stop, k_start, k_stop) with keys in the local shard.
        n_padding: tokens of padding at the end of the shard.
        exchange: what travels between context-parallel ranks; None if nothing does, on any of them.
        kind: shard plan it came from.
    """

    segments: list[tuple[int, int, int, int]]
    n_padding: int = 0
    exchange: ExchangeMeta | None = None
    kind: str = "whole"

    def to(self, device) -> "AttentionMeta":
        return self if self.exchange is None else replace(self, exchange=self.exchange.to(device))


def attention_meta(plan: ShardPlan, rank: int) -> AttentionMeta:
    """Metadata of a context-parallel rank for a shard plan."""

    def rows(segments: np.ndarray) -> list[tuple[int, int, int, int]]:
        return [tuple(s) for s in segments.tolist()]

    padding = plan.chunks[rank][plan.chunks[rank][:, 0] == len(plan.lengths)]
    n_padding = int((padding[:, 2] - padding[:, 1]).sum())
    if not plan.travels():
        return AttentionMeta(rows(plan_exchange(plan, rank).local), n_padding, None, plan.kind)
    x = plan_exchange(plan, rank)
    exchange = ExchangeMeta(
        segments=rows(x.remote),
        n_remote=x.n_remote,
        send_index=torch.from_numpy(x.send_index),
        recv_position=torch.from_numpy(x.recv_position),
        own_index=torch.from_numpy(x.own_index),
        own_position=torch.from_numpy(x.own_position),
        send_splits=x.send_splits.tolist(),
        recv_splits=x.recv_splits.tolist(),
    )
    return AttentionMeta(rows(x.local), n_padding, exchange, plan.kind)


@dataclass
class MicroBatch:
    """One packed sequence, the part of one context-parallel rank.

    Attributes:
        tokens, labels, positions: int64 [1, T/CP]; labels are shifted inside their document, IGNORE_INDEX where there
            is none; positions count from 0 in every document.
        attention: see AttentionMeta.
        lengths: tokens of the documents, in packed order.
        n_tokens: T.
        cp_attention: predicted attention of the (slowest, average) context-parallel rank, any unit.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMeta
    lengths: list[int]
    n_tokens: int
    cp_attention: tuple[float, float] = (1.0, 1.0)

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
    return MicroBatch(
        tokens=torch.from_numpy(packed_tokens[index])[None],
        labels=torch.from_numpy(packed_labels[index])[None],
        positions=torch.from_numpy(positions[index])[None],
        attention=attention_meta(plan, cp_rank),
        lengths=list(plan.lengths),
        n_tokens=total,
    )


@dataclass(frozen=True)
class Layout:
    """What of the layout the loader must know: degrees, my coordinates, how micro-batches are sharded over
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


def build_micro_batch(
    spans: np.ndarray, documents: "Documents", layout: Layout, multiple: int, at_least: int = 0
) -> MicroBatch:
    """Read the tokens of some spans [k, 4] and pack them; no span gives one minimal micro-batch of padding.

    Args:
        multiple: training.seq_len_multiple. at_least: tokens to pad to (strategies of fixed length).
    """
    lengths = span_lengths(spans).tolist()
    n_tokens = padded_length(max(at_least, sum(lengths)), layout.cp, layout.tp, multiple)
    plan = choose_plan(lengths, n_tokens, layout.cp, layout.sharding, layout.kernel_cost)
    parts = spans[:, [ID, START, STOP]].tolist()
    tokens = [documents.tokens(*part) for part in parts]
    labels = [documents.labels(id, start, stop, IGNORE_INDEX) for id, start, stop in parts]
    mb = pack_documents(tokens, labels, plan, layout.cp_rank)
    if plan.cp > 1 and lengths:
        seconds = attention_seconds(plan, layout.kernel_cost)
        mb.cp_attention = float(seconds.max()), float(seconds.mean())
    return mb

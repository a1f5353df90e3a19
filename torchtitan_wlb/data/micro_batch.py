"""Tensors of one micro-batch on one context-parallel rank.

T: padded tokens of the micro-batch. Tensors are [1, T/CP] in the local order of the shard plan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchtitan_wlb.context_parallel.exchange import ShardMeta, shard_meta
from torchtitan_wlb.context_parallel.shard_plan import ShardPlan
from torchtitan_wlb.loss import IGNORE_INDEX


@dataclass
class MicroBatch:
    """One packed sequence, the part of one context-parallel rank.

    Attributes:
        tokens, labels, positions: int64 [1, T/CP]; labels are shifted inside their document, IGNORE_INDEX where there
            is none; positions count from 0 in every document.
        attention: who attends to what.
        lengths: tokens of the documents, in packed order.
        n_tokens: T.
        sharding: kind of the shard plan.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    attention: ShardMeta
    lengths: list[int]
    n_tokens: int
    sharding: str

    def to(self, device) -> "MicroBatch":
        return self._map(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        return self._map(torch.Tensor.pin_memory)

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        moved: Any = {k: move(x) for k, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, attention=self.attention.map(move), **moved)


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
        attention=shard_meta(plan, cp_rank),
        lengths=list(plan.lengths),
        n_tokens=total,
        sharding=plan.kind,
    )

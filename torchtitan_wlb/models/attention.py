"""The attention seam: what a packed micro-batch tells the attention, and the module that the model calls with it.

The model hands q, k, v and a metadata object to `inner_attention` and knows nothing of documents. Another attention
(over context-parallel ranks, or one of your own) is another module in its place.

The metadata is tensors, built once a micro-batch by the loader, and attention is one operator: a compiled block takes
it for what it is, and activation checkpointing can keep its output. No layer loops over documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from torchtitan_wlb.models.kernels import KERNELS, SDPA, Kernel, Segments, cumulative, empty_output

Meta = TypeVar("Meta", bound="AttentionMeta")
_LIBRARY = torch.library.Library("torchtitan_wlb", "DEF")


@dataclass
class AttentionMeta:
    """Who attends to what.

    Attributes:
        index: int32 on the device; it begins with the cumulative lengths [n + 1] of the documents here, end to end.
        sizes: int64 on the host: n, their tokens in total (padding follows), the longest.
    """

    index: torch.Tensor
    sizes: torch.Tensor

    @staticmethod
    def of(lengths: Sequence[int], device: Any = "cpu") -> "AttentionMeta":
        """Of whole documents, end to end."""
        # torch.compile makes a graph of its own for tensors of one element.
        index = torch.from_numpy(cumulative([*lengths, 0])).to(device)
        return AttentionMeta(index, torch.tensor([len(lengths), sum(lengths), max(lengths, default=0)]))

    def bounds(self) -> list[int]:
        """First token of every document here, and the one after the last."""
        return self.index[: int(self.sizes[0]) + 1].tolist()

    def map(self: Meta, move: Callable[[torch.Tensor], torch.Tensor]) -> Meta:
        """With what belongs to the device moved (there, or to pinned memory)."""
        return replace(self, index=move(self.index))


def define(schema: str, compute: Callable, shapes: Callable) -> Any:
    """An operator of the namespace `torchtitan_wlb`.

    Args:
        compute: what it does. shapes: the same for tensors without storage.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchtitan_wlb::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.torchtitan_wlb, name).default


def gradient_shapes(d_out, q, k, v, *_) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of a backward operator, without values."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _forward(q, k, v, index, sizes, kernel: str):
    n, tokens, longest = sizes.tolist()[:3]
    out, lse = empty_output(q)
    if n:
        segments = Segments(index[: n + 1], index[: n + 1], longest, longest)
        KERNELS[kernel].forward(q[:tokens], k[:tokens], v[:tokens], segments, out[:tokens], lse[:, :tokens])
    out[tokens:] = 0
    return out, lse


def _backward(d_out, q, k, v, out, lse, index, sizes, kernel: str):
    n, tokens, longest = sizes.tolist()[:3]
    gradients = tuple(x.new_zeros(x.shape) for x in (q, k, v))
    if n:
        segments = Segments(index[: n + 1], index[: n + 1], longest, longest)
        mine = (x[:tokens] for x in (d_out, q, k, v, out))
        for to, g in zip(gradients, KERNELS[kernel].backward(*mine, lse[:, :tokens], segments)):
            to[:tokens] = g
    return gradients


packed_attention = define(
    "packed_attention(Tensor q, Tensor k, Tensor v, Tensor index, Tensor sizes, str kernel) -> (Tensor, Tensor)",
    _forward,
    lambda q, *_: empty_output(q),
)
packed_attention_backward = define(
    "packed_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor index, "
    "Tensor sizes, str kernel) -> (Tensor, Tensor, Tensor)",
    _backward,
    gradient_shapes,
)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, index, sizes, kernel: str):
        out, lse = packed_attention(q, k, v, index, sizes, kernel)
        ctx.save_for_backward(q, k, v, out, lse, index, sizes)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx, d_out):
        return *packed_attention_backward(d_out, *ctx.saved_tensors, ctx.kernel), None, None, None


class PackedAttention(nn.Module):
    """Causal attention inside the documents of a packed sequence."""

    def __init__(self, kernel: Kernel = SDPA):
        super().__init__()
        self.kernel = kernel.name

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """q [1, T, Hq/TP, D], k, v [1, T, Hkv/TP, D] -> [1, T, Hq/TP, D], zero on padding."""
        # squeeze: the backward of an index would fill a tensor of zeros and copy into it.
        q, k, v = (x.squeeze(0) for x in (q, k, v))
        return self.attend(q, k, v, meta)[None]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """The same without the batch dimension."""
        return _PackedAttention.apply(q, k, v, meta.index, meta.sizes, self.kernel)

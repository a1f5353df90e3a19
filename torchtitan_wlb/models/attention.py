"""The attention seam: what a packed micro-batch tells the attention, and the module that the model calls with it.

The model hands q, k, v and a metadata object to `inner_attention` and knows nothing of documents. Another attention
(over context-parallel ranks, or one of your own) is another module in its place.
"""

from dataclasses import dataclass

import torch
from torch import nn

from torchtitan_wlb.models.kernels import SDPA, Kernel, Segments


@dataclass
class AttentionMeta:
    """Who attends to what.

    Attributes:
        segments: (q_start, q_stop, k_start, k_stop), see kernels.py; one for every document of a packed sequence.
        n_padding: tokens of padding at the end, whose output is zero.
    """

    segments: Segments
    n_padding: int = 0


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, meta: AttentionMeta, kernel: Kernel):
        out, lse = kernel.forward(q, k, v, meta.segments)
        zero_padding(out, meta)
        ctx.meta, ctx.kernel = meta, kernel
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        return *ctx.kernel.backward(d_out, *ctx.saved_tensors, ctx.meta.segments), None, None


def zero_padding(out: torch.Tensor, meta: AttentionMeta) -> None:
    """Fill what no segment has written: the padding at the end of out [T, H, D]."""
    out[out.shape[0] - meta.n_padding :] = 0


class PackedAttention(nn.Module):
    """Causal attention inside the documents of a packed sequence."""

    def __init__(self, kernel: Kernel = SDPA):
        super().__init__()
        self.kernel = kernel

    # Outside compiled regions: document lengths are plain ints here and would recompile for every micro-batch.
    @torch.compiler.disable
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """q [1, T, Hq/TP, D], k, v [1, T, Hkv/TP, D] -> [1, T, Hq/TP, D], zero on padding."""
        # squeeze: the backward of an index would fill a tensor of zeros and copy into it.
        q, k, v = (x.squeeze(0) for x in (q, k, v))
        return self.attend(q, k, v, meta)[None]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """The same without the batch dimension."""
        return _PackedAttention.apply(q, k, v, meta, self.kernel)

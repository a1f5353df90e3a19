"""Attention of a context-parallel rank: exchange the K/V that must travel, attend, send their gradients back.

    q, k, v [T/CP, H/TP, D] local
      1. start one all-to-all with the tokens of K and V that other ranks need (exchange.py says which)
      2. local segments: queries and keys of this rank, while 1. is under way
      3. remote segments: keys of documents that several ranks share, assembled from own and received tokens
    backward: the same in reverse; gradients of received K/V travel back in one all-to-all.

Saved for backward in tokens of K and V: the local shard (T/CP) and the remote keys, or with recompute_kv the local
shard only: the exchange is then done again. (Keeping every rank's K and V would be 2 x T.)
"""

import torch
import torch.distributed as dist

from torchtitan_wlb.context_parallel.exchange import Exchange, ShardMeta
from torchtitan_wlb.models.attention import AttentionMeta, PackedAttention, zero_padding
from torchtitan_wlb.models.kernels import Kernel


def _start(kv: torch.Tensor, x: Exchange, group):
    """Begin the exchange of kv [T/CP, 2, H, D]; (received [tokens, 2, H, D], what is sent, work)."""
    sent = kv.index_select(0, x.send_index)
    received = kv.new_empty(len(x.recv_position), *kv.shape[1:])
    work = dist.all_to_all_single(received, sent, x.recv_splits, x.send_splits, group=group, async_op=True)
    return received, sent, work


def _assemble(kv: torch.Tensor, received: torch.Tensor, x: Exchange) -> torch.Tensor:
    """Remote keys and values [R, 2, H, D]."""
    remote = kv.new_empty(x.n_remote, *kv.shape[1:])
    remote[x.own_position] = kv[x.own_index]
    remote[x.recv_position] = received
    return remote


class _ExchangedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, meta: ShardMeta, kernel: Kernel, group, recompute_kv: bool):
        ctx.meta, ctx.kernel, ctx.group = meta, kernel, group
        x = meta.exchange
        assert x is not None
        kv = torch.stack([k, v], dim=1)
        received, _sent, work = _start(kv, x, group)
        out, lse = kernel.forward(q, k, v, meta.segments)
        work.wait()
        remote = _assemble(kv, received, x)
        o, l = kernel.forward(q, *remote.unbind(1), x.segments)
        for q0, q1, _, _ in x.segments:
            out[q0:q1], lse[:, q0:q1] = o[q0:q1], l[:, q0:q1]
        zero_padding(out, meta)
        ctx.save_for_backward(q, k, v, out, lse, None if recompute_kv else remote)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse, remote = ctx.saved_tensors
        meta, kernel, group, x = ctx.meta, ctx.kernel, ctx.group, ctx.meta.exchange
        again = None
        if remote is None:
            kv = torch.stack([k, v], dim=1)
            again = _start(kv, x, group)
        dq, dk, dv = kernel.backward(d_out, q, k, v, out, lse, meta.segments)
        if again is not None:
            again[2].wait()
            remote = _assemble(kv, again[0], x)
        gq, *g_remote = kernel.backward(d_out, q, *remote.unbind(1), out, lse, x.segments)
        g_remote = torch.stack(g_remote, dim=1)
        back = g_remote.new_empty(len(x.send_index), *g_remote.shape[1:])
        dist.all_to_all_single(back, g_remote[x.recv_position], x.send_splits, x.recv_splits, group=group)
        g_local = torch.stack([dk, dv], dim=1)
        g_local.index_add_(0, x.own_index, g_remote[x.own_position])
        g_local.index_add_(0, x.send_index, back)
        return dq + gq, *g_local.unbind(1), None, None, None, None


class ContextParallelAttention(PackedAttention):
    """Causal attention inside documents whose tokens several ranks hold.

    Args:
        kernel: see models/kernels.py.
        group: the context-parallel ranks.
        recompute_kv: exchange again in backward instead of keeping the remote keys.
    """

    def __init__(self, kernel: Kernel, group: dist.ProcessGroup, recompute_kv: bool = False):
        super().__init__(kernel)
        self.group, self.recompute_kv = group, recompute_kv

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """q [T/CP, Hq/TP, D], k, v [T/CP, Hkv/TP, D] -> [T/CP, Hq/TP, D]; meta is a ShardMeta."""
        assert isinstance(meta, ShardMeta)
        if meta.exchange is None:
            return super().attend(q, k, v, meta)
        return _ExchangedAttention.apply(q, k, v, meta, self.kernel, self.group, self.recompute_kv)

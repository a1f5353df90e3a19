"""Attention of a context-parallel rank: exchange the K/V that must travel, attend, send their gradients back.

    q, k, v [T/CP, H/TP, D] local
      1. start one all-to-all with the tokens of K and V that other ranks need (exchange.py says which)
      2. local segments: queries and keys of this rank, while 1. is under way
      3. later segments: keys of documents that several ranks share, gathered from own and received tokens
    backward: 3. first, its gradients of K and V travel back while 2. is computed; all sums in fp32

Saved for backward in tokens of K and V: the local shard (T/CP) and what was received, or with recompute_kv the local
shard only: the exchange is then done again. (Keeping every rank's K and V would be 2 x T.)
"""

import torch
import torch.distributed as dist

from torchtitan_wlb.context_parallel.exchange import Shard, ShardMeta
from torchtitan_wlb.models.attention import AttentionMeta, PackedAttention, define, gradient_shapes
from torchtitan_wlb.models.kernels import KERNELS, Kernel, empty_output
from torchtitan_wlb.torch_private import resolve_group


def _start(kv: torch.Tensor, n_own: int, s: Shard, group: str):
    """Begin the exchange of kv [T/CP + received, 2, H, D], of which the first T/CP are this rank's."""
    n_received = sum(s.recv_splits)
    sent = kv.index_select(0, s.send_index)
    to = kv[n_own : n_own + n_received]
    return dist.all_to_all_single(to, sent, s.recv_splits, s.send_splits, group=resolve_group(group), async_op=True)


def _with_room(k: torch.Tensor, v: torch.Tensor, rows: int) -> torch.Tensor:
    """K and V [T/CP, H, D] as [T/CP + rows, 2, H, D], the last rows not filled."""
    kv = k.new_empty(len(k) + rows, 2, *k.shape[1:])
    kv[: len(k), 0], kv[: len(k), 1] = k, v
    return kv


def _forward(q, k, v, index, sizes, room, kernel: str, group: str, keep: bool):
    s, compute = Shard.read(index, sizes), KERNELS[kernel].forward
    n, stop = s.n_local, s.n_local + s.n_later
    out, lse = empty_output(q)
    work, kv = None, k.new_empty(0)
    if s.travels:
        kv = _with_room(k, v, len(room))
        work = _start(kv, len(k), s, group)
    if n:
        compute(q[:n], k[:n], v[:n], s.local, out[:n], lse[:, :n])
    if work is not None:
        work.wait()
    if stop > n:
        keys, values = kv.index_select(0, s.key_source).unbind(1)
        compute(q[n:stop], keys, values, s.later, out[n:stop], lse[:, n:stop])
    out[stop:] = 0
    received = k.new_empty(len(room) if keep else 0, 2, *k.shape[1:])
    if keep and s.travels:
        received.copy_(kv[len(k) :])
    return out, lse, received


def _backward(d_out, q, k, v, out, lse, received, index, sizes, room, kernel: str, group: str):
    s, compute = Shard.read(index, sizes), KERNELS[kernel].backward
    n, stop = s.n_local, s.n_local + s.n_later
    dq = q.new_zeros(q.shape)
    # Of K and V, own and received: keys of several chunks and ranks add up.
    g = k.new_zeros(len(k) + len(room), 2, *k.shape[1:], dtype=torch.promote_types(k.dtype, torch.float32))

    def local() -> None:
        if n:
            dq[:n], dk, dv = compute(d_out[:n], q[:n], k[:n], v[:n], out[:n], lse[:, :n], s.local)
            g[:n, 0] += dk
            g[:n, 1] += dv

    def later(kv: torch.Tensor):
        """Gradients of what the later segments attend to; those of received keys are on their way back."""
        if stop > n:
            keys, values = kv.index_select(0, s.key_source).unbind(1)
            of = (x[n:stop] for x in (d_out, q))
            dq[n:stop], dk, dv = compute(*of, keys, values, out[n:stop], lse[:, n:stop], s.later)
            g.index_add_(0, s.key_source, torch.stack([dk, dv], dim=1).to(g.dtype))
        home = g[len(k) : len(k) + sum(s.recv_splits)].to(k.dtype)
        back = k.new_empty(len(s.send_index), 2, *k.shape[1:])
        return back, dist.all_to_all_single(
            back, home, s.send_splits, s.recv_splits, group=resolve_group(group), async_op=True
        )

    if not s.travels:
        local()
    else:
        kv = _with_room(k, v, len(room))
        if len(received):
            kv[len(k) :] = received
            back, work = later(kv)
            local()
        else:
            again = _start(kv, len(k), s, group)
            local()
            again.wait()
            back, work = later(kv)
        work.wait()
        g.index_add_(0, s.send_index, back.to(g.dtype))
    dk, dv = (x.to(k.dtype, memory_format=torch.contiguous_format, copy=True) for x in g[: len(k)].unbind(1))
    return dq, dk, dv


def _forward_shapes(q, k, v, index, sizes, room, kernel, group, keep):
    return *empty_output(q), k.new_empty(room.shape[0] if keep else 0, 2, *k.shape[1:])


shard_attention = define(
    "shard_attention(Tensor q, Tensor k, Tensor v, Tensor index, Tensor sizes, Tensor room, str kernel, str group, "
    "bool keep) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_shapes,
)
shard_attention_backward = define(
    "shard_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor received, "
    "Tensor index, Tensor sizes, Tensor room, str kernel, str group) -> (Tensor, Tensor, Tensor)",
    _backward,
    gradient_shapes,
)


class _ShardAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, index, sizes, room, kernel: str, group: str, keep: bool):
        out, lse, received = shard_attention(q, k, v, index, sizes, room, kernel, group, keep)
        ctx.save_for_backward(q, k, v, out, lse, received, index, sizes, room)
        ctx.how = kernel, group
        return out

    @staticmethod
    def backward(ctx, d_out):
        gradients = shard_attention_backward(d_out, *ctx.saved_tensors, *ctx.how)
        return *gradients, None, None, None, None, None, None


class ContextParallelAttention(PackedAttention):
    """Causal attention inside documents whose tokens several ranks hold.

    Args:
        kernel: see models/kernels.py.
        group: the context-parallel ranks.
        recompute_kv: exchange again in backward instead of keeping what was received.
    """

    def __init__(self, kernel: Kernel, group: dist.ProcessGroup, recompute_kv: bool = False):
        super().__init__(kernel)
        self.group, self.keep = group.group_name, not recompute_kv

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """q [T/CP, Hq/TP, D], k, v [T/CP, Hkv/TP, D] -> [T/CP, Hq/TP, D]; meta is a ShardMeta."""
        assert isinstance(meta, ShardMeta)
        return _ShardAttention.apply(q, k, v, meta.index, meta.sizes, meta.room, self.kernel, self.group, self.keep)

"""Megatron-style tensor parallelism with sequence parallelism: parameters are DTensors, activations plain tensors.

    x [1, T/CP/TP, dim] ── norm ── gather ──► [1, T/CP, dim] ── column products ── heads or features of this rank
                                                                                          │
    x [1, T/CP/TP, dim] ◄──────────────────────── sum over ranks, scatter ◄── row product ┘

Between blocks every rank holds its T/CP/TP tokens. Activations are not DTensors because every new length would then
cost a sharding propagation in each operator, and because compiled regions would see two lengths, the local and the
whole one, for every tensor. What is not sharded (norms) sees only the rank's tokens, so its gradient is a partial sum;
FSDP2 brings gradients to the placement of their parameter.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from torchtitan_wlb.models.llama import Transformer
from torchtitan_wlb.models.norm import RMSNorm, rms_norm

_ops = torch.ops._c10d_functional


def _gather(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x[0].contiguous(), ranks, group))[None]


def _scatter(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x[0].contiguous(), "sum", ranks, group))[None]


class _Exchange(torch.autograd.Function):
    """Gather tokens, or scatter their sum; each is the other's backward."""

    @staticmethod
    def forward(ctx, x, gather: bool, ranks: int, group: str):
        ctx.gather, ctx.ranks, ctx.group = gather, ranks, group
        return _gather(x, ranks, group) if gather else _scatter(x, ranks, group)

    @staticmethod
    def backward(ctx, grad):
        back = _scatter if ctx.gather else _gather
        return back(grad, ctx.ranks, ctx.group), None, None, None


class _Sharded(nn.Module):
    """A weight as a DTensor over the tensor-parallel ranks."""

    def __init__(self, weight: nn.Parameter, mesh: DeviceMesh, placement: Placement):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [placement]))
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.group = mesh.get_group().group_name

    def local(self, gradient: Placement | None = None) -> torch.Tensor:
        """This rank's part of the weight; its gradient is a part of the same kind, or as said."""
        assert isinstance(self.weight, DTensor)
        return self.weight.to_local(grad_placements=None if gradient is None else [gradient])


class GatherTokens(nn.Module):
    """[1, T/CP/TP, dim] -> [1, T/CP, dim]; backward sums over the ranks, each of which used the tokens for its part."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.ranks, self.group = mesh.size(), mesh.get_group().group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Exchange.apply(x, True, self.ranks, self.group)


class ColumnLinear(_Sharded):
    """[1, T/CP, in] -> [1, T/CP, out/TP]."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh):
        super().__init__(linear.weight, mesh, Shard(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.local())


class RowLinear(_Sharded):
    """[1, T/CP, in/TP] -> [1, T/CP/TP, out]."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh):
        super().__init__(linear.weight, mesh, Shard(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Exchange.apply(F.linear(x, self.local()), False, self.ranks, self.group)


class KVHeadLinear(_Sharded):
    """Key or value projection when there are more ranks than K/V heads: TP / Hkv ranks compute the same head, [1, T/CP,
    dim] -> [1, T/CP, D], each for other query heads."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, head_dim: int):
        super().__init__(linear.weight, mesh, Replicate())
        first = self.rank * (linear.out_features // head_dim) // self.ranks * head_dim
        self.first, self.stop = first, first + head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.local(Partial())[self.first : self.stop])


class TokenNorm(_Sharded):
    """RMSNorm of this rank's tokens."""

    def __init__(self, norm: RMSNorm, mesh: DeviceMesh):
        super().__init__(norm.weight, mesh, Replicate())
        self.eps = norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.local(Partial()), self.eps)


class VocabEmbedding(_Sharded):
    """Token ids [1, T/CP] -> [1, T/CP/TP, dim]; each rank looks up the ids of its part of the vocabulary."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh):
        super().__init__(embedding.weight, mesh, Shard(0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weight = self.local()
        ids = ids - self.rank * len(weight)
        mine = (ids >= 0) & (ids < len(weight))
        rows = F.embedding(torch.where(mine, ids, 0), weight) * mine[..., None]
        return _Exchange.apply(rows, False, self.ranks, self.group)


def apply_tp(model: Transformer, mesh: DeviceMesh) -> None:
    """Make a stage on the meta device tensor parallel, in place. Heads, ffn_dim and vocabulary must divide by TP."""
    head_dim, n_kv_heads = model.args.head_dim, model.args.n_kv_heads
    if model.tok_embeddings is not None:
        model.tok_embeddings = VocabEmbedding(model.tok_embeddings, mesh)
    for block in model.layers.values():
        attention, ffn = block.attention, block.feed_forward
        block.gather = GatherTokens(mesh)
        block.attention_norm, block.ffn_norm = (TokenNorm(n, mesh) for n in (block.attention_norm, block.ffn_norm))
        attention.wq, attention.wo = ColumnLinear(attention.wq, mesh), RowLinear(attention.wo, mesh)
        for name in ("wk", "wv"):
            linear = getattr(attention, name)
            divides = n_kv_heads % mesh.size() == 0
            setattr(attention, name, ColumnLinear(linear, mesh) if divides else KVHeadLinear(linear, mesh, head_dim))
        ffn.w1, ffn.w3, ffn.w2 = ColumnLinear(ffn.w1, mesh), ColumnLinear(ffn.w3, mesh), RowLinear(ffn.w2, mesh)
    if model.output is not None:
        model.norm = TokenNorm(model.norm, mesh)
        model.output.gather = GatherTokens(mesh)
        model.output.weight = nn.Parameter(distribute_tensor(model.output.weight, mesh, [Shard(0)]))
        model.output.tp_group = mesh.get_group()

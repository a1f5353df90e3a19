"""Tensor parallelism with sequence parallelism as styles for torch's parallelize_module; the plan is `apply_tp` in
parallelize_llama.py.

    x [1, T/CP/TP, dim] ── norm ── gather ──► [1, T/CP, dim] ── column products ── heads or features of this rank
                                                                                          │
    x [1, T/CP/TP, dim] ◄──────────────────────── sum over ranks, scatter ◄── row product ┘

Parameters are DTensors, activations plain tensors. torch's own styles make DTensors of activations: compiled with
dynamic lengths they end in a RecursionError in inductor (2.13, tests/distributed_tests/test_native_tp.py), and eager
they propagate shardings anew for every length, half of the step's time again.

A style swaps the class of a module for one below that computes this rank's part. What is not sharded (norms) sees only
the rank's tokens, so its gradient is a partial sum; FSDP2 brings gradients to the placement of their parameter.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan_wlb.models.llama import LossHead
from torchtitan_wlb.torch_private import all_gather, reduce_scatter, wait_tensor


def _gather(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return wait_tensor(all_gather(x[0].contiguous(), ranks, group))[None]


def _scatter(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return wait_tensor(reduce_scatter(x[0].contiguous(), "sum", ranks, group))[None]


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


class _Tokens:
    """Moves tokens [1, T/CP(/TP), ...] between the ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh):
        self.rank, self.ranks, self.group = mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T/CP/TP, ...] -> [1, T/CP, ...]; backward sums over the ranks, each of which used them for its part."""
        return _Exchange.apply(x, True, self.ranks, self.group)

    def sum_and_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T/CP, ...] -> [1, T/CP/TP, ...]"""
        return _Exchange.apply(x, False, self.ranks, self.group)


def _local(weight: torch.Tensor, gradient: Placement | None = None) -> torch.Tensor:
    """This rank's part of a weight; its gradient is a part of the same kind, or as said."""
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=None if gradient is None else [gradient])


class _ColumnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, _local(self.weight), None if self.bias is None else _local(self.bias))


class _RowLinear(nn.Linear):
    tokens: _Tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens.sum_and_scatter(F.linear(x, _local(self.weight)))


class _HeadLinear(nn.Linear):
    rows: slice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else _local(self.bias, Partial())[self.rows]
        return F.linear(x, _local(self.weight, Partial())[self.rows], bias)


class _TokenNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, _local(self.weight, Partial()), self.eps)


class _VocabEmbedding(nn.Embedding):
    tokens: _Tokens

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weight = _local(self.weight)
        ids = ids - self.tokens.rank * len(weight)
        mine = (ids >= 0) & (ids < len(weight))
        rows = F.embedding(torch.where(mine, ids, 0), weight) * mine[..., None]
        return self.tokens.sum_and_scatter(rows)


class _VocabHead(LossHead):
    tokens: _Tokens
    ranks: Any

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.tokens.gather(x), _local(self.weight), labels, self.ranks)


class _Style(ParallelStyle):
    """Makes the parameters of a module DTensors and gives it another class."""

    becomes: type[nn.Module]
    placement: Placement = Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p, device_mesh, [self.placement])))
        module.__class__ = self.becomes
        module.tokens = _Tokens(device_mesh)
        return module


class ColwiseTokens(_Style):
    """Linear split by output: [1, T/CP, in] -> [1, T/CP, out/TP]."""

    becomes, placement = _ColumnLinear, Shard(0)


class RowwiseTokens(_Style):
    """Linear split by input: [1, T/CP, in/TP] -> [1, T/CP/TP, out]."""

    becomes, placement = _RowLinear, Shard(1)


class HeadTokens(_Style):
    """Key or value projection when there are more ranks than K/V heads: TP / Hkv ranks compute the same head, [1, T/CP,
    dim] -> [1, T/CP, D], each for other query heads."""

    becomes = _HeadLinear

    def __init__(self, head_dim: int):
        self.head_dim = head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        n_kv_heads = module.out_features // self.head_dim
        first = device_mesh.get_local_rank() * n_kv_heads // device_mesh.size() * self.head_dim
        module.rows = slice(first, first + self.head_dim)
        return super()._apply(module, device_mesh)


class TokenNorm(_Style):
    """RMSNorm of this rank's tokens [1, T/CP/TP, dim], or of its heads [1, T/CP, H/TP, D]; the shape stays."""

    becomes = _TokenNorm


class GatherTokens(ParallelStyle):
    """The first argument of a module becomes the tokens of all ranks: [1, T/CP/TP, dim] -> [1, T/CP, dim]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tokens = _Tokens(device_mesh)
        module.register_forward_pre_hook(lambda _, args: (tokens.gather(args[0]), *args[1:]))
        return module


class VocabEmbedding(_Style):
    """Token ids [1, T/CP] -> [1, T/CP/TP, dim]; each rank looks up the ids of its part of the vocabulary."""

    becomes, placement = _VocabEmbedding, Shard(0)


class VocabHead(_Style):
    """Head and loss of [1, T/CP/TP, dim]; each rank has a part of the vocabulary and needs all tokens for it."""

    becomes, placement = _VocabHead, Shard(0)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.ranks = device_mesh.get_group()
        return super()._apply(module, device_mesh)

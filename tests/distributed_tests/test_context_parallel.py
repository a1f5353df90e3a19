"""Attention over context-parallel ranks in real processes: outputs, gradients, bytes sent, and torch's own sharding with our plans."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed_tests.ranks import run_ranks
from torchtitan_wlb.context_parallel.attention import ContextParallelAttention
from torchtitan_wlb.context_parallel.exchange import shard_meta
from torchtitan_wlb.context_parallel.load_balancer import PlanLoadBalancer
from torchtitan_wlb.context_parallel.selection import KINDS, choose_plan
from torchtitan_wlb.context_parallel.shard_plan import whole
from torchtitan_wlb.context_parallel.traffic import received_tokens
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import analytic_kernel_cost
from torchtitan_wlb.data.micro_batch import padded_length
from torchtitan_wlb.models.attention import PackedAttention
from torchtitan_wlb.models.kernels import SDPA

HEADS, KV_HEADS, DIM = 4, 2, 8
MICRO_BATCHES = [
    [1],
    [300],
    [1] * 40,
    [3, 1, 200, 1, 64, 17],
    [5] * 100,
    [64, 64, 64, 64],
    [250, *[2] * 30],
    np.random.default_rng(0).integers(1, 90, 25).tolist(),
]


def _attend(group) -> None:
    rank, cp = dist.get_rank(), dist.get_world_size()
    kernel_cost = analytic_kernel_cost(DEVICES["h100"], 1.0, 1.0)
    sent: list[int] = []
    plain = dist.all_to_all_single

    def counted(output, tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return plain(output, tensor, *args, **kwargs)

    dist.all_to_all_single = counted
    for i, lengths in enumerate(MICRO_BATCHES):
        total = padded_length(sum(lengths), cp, 1, 8)
        generator = torch.Generator().manual_seed(i)
        q, k, v, g = (torch.randn(1, total, h, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        truth = PackedAttention(SDPA)(*leaves, shard_meta(whole(lengths, total), 0))
        expected = torch.autograd.grad(truth, leaves, g)
        for kind in (*KINDS, "adaptive"):
            for recompute_kv in (False, True):
                plan = choose_plan(lengths, total, cp, kind, kernel_cost)
                index = torch.from_numpy(plan.token_index(rank))
                mine = [x[:, index].clone().requires_grad_() for x in (q, k, v)]
                sent.clear()
                out = ContextParallelAttention(SDPA, group, recompute_kv)(*mine, shard_meta(plan, rank))
                forward_sent = list(sent)
                gradients = torch.autograd.grad(out, mine, g[:, index])
                for got, want in zip((out, *gradients), (truth, *expected)):
                    torch.testing.assert_close(got, want[:, index], rtol=1e-5, atol=1e-5, msg=f"{lengths} {kind}")
                # K and V of each token once, in one collective each way; nothing at all if nothing must travel.
                count = torch.tensor([sum(forward_sent), sum(sent)])
                dist.all_reduce(count)
                values = int(received_tokens(plan).sum()) * 2 * KV_HEADS * DIM
                assert count.tolist() == [values, values * (3 if recompute_kv else 2)]
                assert len(forward_sent) == int(received_tokens(plan).any())


def _errors_in_half_precision(group) -> None:
    """Relative error of dK and dV in bf16 against fp64: over ranks no larger than on one, since sums are in fp32."""
    rank, cp = dist.get_rank(), dist.get_world_size()
    lengths = [700, 3, 250, 60]
    total = padded_length(sum(lengths), cp, 1, 8)
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (
        torch.randn(1, total, h, 32, generator=generator).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )

    def gradients(attention, plan, rank, dtype) -> list[torch.Tensor]:
        index = torch.from_numpy(plan.token_index(rank))
        mine = [x[:, index].to(dtype).requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(attention(*mine, shard_meta(plan, rank)), mine, g[:, index].to(dtype))
        return [x.double() for x in found[1:]]

    exact = gradients(PackedAttention(SDPA), whole(lengths, total), 0, torch.float64)
    alone = gradients(PackedAttention(SDPA), whole(lengths, total), 0, torch.bfloat16)
    plan = choose_plan(lengths, total, cp, "per_document", analytic_kernel_cost(DEVICES["h100"], 1.0, 1.0))
    index = torch.from_numpy(plan.token_index(rank))
    together = gradients(ContextParallelAttention(SDPA, group), plan, rank, torch.bfloat16)
    for one, several, truth in zip(alone, together, exact):
        squares = torch.stack([(several - truth[:, index]).square().sum(), (one - truth).square().sum() / cp])
        dist.all_reduce(squares)
        error, error_alone = (squares.sqrt() / truth.norm()).tolist()
        if rank == 0:
            print(f"bf16, CP={cp}: relative error {error:.2e}, on one rank {error_alone:.2e}")
        assert error < 1.1 * error_alone


def _native() -> None:
    """torch's _context_parallel_shard with a plan as load balancer gives every rank the tokens of the plan."""
    from torch.distributed.tensor.experimental._attention import _context_parallel_shard

    cp = dist.get_world_size()
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    lengths = [100, 7, 33, 1, 200]
    total = padded_length(sum(lengths), cp, 1, 8)
    for kind in KINDS:
        plan = choose_plan(lengths, total, cp, kind, analytic_kernel_cost(DEVICES["h100"], 1.0, 1.0))
        tokens = torch.arange(total)[None]
        (shard,) = _context_parallel_shard(mesh, [tokens], [1], PlanLoadBalancer(plan))
        assert shard[0].tolist() == plan.token_index(dist.get_rank()).tolist(), kind


def _both() -> None:
    _attend(dist.group.WORLD)
    _errors_in_half_precision(dist.group.WORLD)
    _native()


@pytest.mark.parametrize("cp", [2, 4])
def test_attention_equals_one_rank_and_sends_what_the_plan_says(cp):
    run_ranks(cp, _both)

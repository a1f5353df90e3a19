"""Attention kernel, chunked loss, rotary table, layer split: against textbook formulas in fp64."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.timing import attend_and_back
from torchtitan_wlb.context_parallel.selection import choose_plan
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import analytic_kernel_cost
from torchtitan_wlb.cost.step_time import stages_of
from torchtitan_wlb.data.micro_batch import padded_length
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.loss import chunked_cross_entropy
from torchtitan_wlb.models import kernels
from torchtitan_wlb.models.kernels import SDPA, Segments, select_kernel
from torchtitan_wlb.models.llama import Transformer
from torchtitan_wlb.models.model_args import ModelArgs, RopeScaling, llama_configs
from torchtitan_wlb.models.rotary import rotary_table
from torchtitan_wlb.parallelisms.pipeline_llama import split_layers
from torchtitan_wlb.parallelisms.schedules import schedule_actions


def dense_attention(q, k, v, segments):
    """Masked softmax over everything, the definition."""
    group = q.shape[1] // k.shape[1]
    mask = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    for q0, q1, k0, k1 in segments:
        for i in range(q0, q1):
            mask[i, k0 : k1 - (q1 - 1 - i)] = True
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / math.sqrt(q.shape[-1])
    p = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1))


def run_kernel(kernel, q, k, v, g, segments):
    """(output, gradients)."""
    out, *gradients = attend_and_back(kernel, [q, k, v, g], segments)
    return out, gradients


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.one_of(st.just(1), st.integers(1, 60)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4, 16]),
    st.sampled_from(["per_sequence", "per_document", "hybrid"]),
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
)
def test_chunks_of_all_ranks_make_the_whole_attention(lengths, cp, sharding, heads):
    """Ranks simulated one after the other: outputs and summed gradients equal dense attention, padding gets zeros."""
    total = padded_length(sum(lengths), cp, 1, 16)
    plan = choose_plan(lengths, total, cp, sharding, analytic_kernel_cost(DEVICES["cpu"], 1.0, 1.0))
    generator = torch.Generator().manual_seed(len(lengths))
    q, k, v, g = (
        torch.randn(total, h, 8, generator=generator, dtype=torch.float64)
        for h in (heads[0], heads[1], heads[1], heads[0])
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    truth = dense_attention(*leaves, [(a, b, a, b) for a, b in pairwise(starts)])
    expected = torch.autograd.grad(truth, leaves, g)
    out, dq, dk, dv = (
        torch.full_like(truth, float("nan")),
        torch.zeros_like(q),
        torch.zeros_like(k),
        torch.zeros_like(v),
    )
    for rank in range(cp):
        queries, keys, positions = plan.segments(rank)
        index, used = torch.from_numpy(plan.token_index(rank)), torch.from_numpy(positions)
        mine = index[: queries.sum()]  # padding comes last
        o, gradients = run_kernel(SDPA, q[mine], k[used], v[used], g[mine], Segments.of(queries, keys))
        out[index] = 0
        out[mine], dq[mine] = o, gradients[0]
        dk.index_add_(0, used, gradients[1])
        dv.index_add_(0, used, gradients[2])
    torch.testing.assert_close(out, truth.detach(), rtol=1e-10, atol=1e-10)
    assert (out[sum(lengths) :] == 0).all()
    for got, want in zip((dq, dk, dv), expected):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["sdpa", "plain", "varlen", "flash"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_kernels_agree(name, heads, monkeypatch):
    """One suite for all kernels: whole documents, one-token documents, chunks."""
    device, dtype, tolerance = "cpu", torch.float32, 1e-5
    if name == "plain":  # what sdpa does on devices other than CPUs
        monkeypatch.setattr(kernels, "_cpu_part", kernels._plain_part)
        monkeypatch.setattr(kernels, "_cpu_part_backward", kernels._plain_part_backward)
        monkeypatch.setattr(kernels, "_ROWS", 16)
    elif name != "sdpa":
        if not torch.cuda.is_available():
            pytest.skip(f"{name} needs a CUDA device")
        if name == "flash":
            pytest.importorskip("flash_attn")
        device, dtype, tolerance = "cuda", torch.bfloat16, 2e-2
    kernel = SDPA if name == "plain" else kernels.KERNELS[name]
    torch.manual_seed(0)
    q, k, v, g = (
        torch.randn(n, h, 16).to(dtype) for n, h in ((80, heads[0]), (179, heads[1]), (179, heads[1]), (80, heads[0]))
    )
    segments = Segments.of([40, 1, 19, 20], [40, 1, 59, 79], device)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    truth = dense_attention(*leaves, segments.ranges())
    expected = torch.autograd.grad(truth, leaves, g.double())
    out, gradients = run_kernel(kernel, *(x.to(device) for x in (q, k, v, g)), segments)
    for got, want in zip((out, *gradients), (truth, *expected)):
        assert ((got.cpu().double() - want).norm() / want.norm()).item() < tolerance


def test_attention_memory_is_linear():
    """The kernel never allocates anything of the size of a mask."""
    peak = {}
    for t in (1024, 4096):
        q, k = torch.randn(t, 2, 16), torch.randn(t, 1, 16)
        with torch.profiler.profile(profile_memory=True) as profile:
            run_kernel(SDPA, q, k, k, q, Segments.of([t // 2, t // 2], [t // 4, 3 * t // 4]))
        peak[t] = max(max(0, e.self_cpu_memory_usage) for e in profile.events())
    assert 0 < peak[4096] < 8 * peak[1024] and peak[4096] < 4096 * 4096


def test_kernel_choice(monkeypatch, caplog):
    assert select_kernel("cpu", torch.bfloat16) is SDPA
    assert select_kernel("cuda", torch.float32) is SDPA
    with pytest.raises(ConfigError, match=r"model\.attention varlen: .*needs CUDA and bf16 or fp16, not cpu"):
        select_kernel("cpu", torch.float32, "varlen")
    # A device of capability 9 without the packages, and one on which ATen's kernel is wrong.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(kernels, "relative_error", lambda kernel, device: 0.001)
    with caplog.at_level("INFO"):
        assert select_kernel("cuda", torch.bfloat16) is kernels.VARLEN
    with pytest.raises(ConfigError, match=r"attention fa3: fa3: flash_attn_interface cannot be used"):
        select_kernel("cuda", torch.bfloat16, "fa3")
    monkeypatch.setattr(kernels, "relative_error", lambda kernel, device: 0.3)
    with pytest.raises(ConfigError, match=r"attention auto: fa4: .* varlen: is off by 30"):
        select_kernel("cuda", torch.bfloat16)


def test_the_check_at_start_sees_a_wrong_kernel():
    assert kernels.relative_error(SDPA, torch.device("cpu"), torch.float32) < 1e-6
    scaled = replace(SDPA, backward=lambda *a: tuple(1.1 * g for g in SDPA.backward(*a)))
    assert kernels.relative_error(scaled, torch.device("cpu"), torch.float32) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("chunk", [3, 7, 100])
def test_chunked_cross_entropy(chunk):
    torch.manual_seed(0)
    hidden = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 10, (20,))
    labels[[0, 5, 19]] = -100
    for y in (labels, torch.full_like(labels, -100)):
        truth = F.cross_entropy(hidden @ weight[:10].T, y, ignore_index=-100, reduction="sum") * 0.3
        loss = chunked_cross_entropy(hidden, weight, y, chunk=chunk, n_ids=10) * 0.3
        torch.testing.assert_close(loss, truth)
        for got, want in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(truth, (hidden, weight))):
            torch.testing.assert_close(got, want)


def test_loss_in_bf16_sums_chunks_in_fp32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4096, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    labels = torch.randint(0, 64, (4096,))
    gradients = []
    for chunk in (32, 4096):
        w = weight.clone().requires_grad_()
        chunked_cross_entropy(hidden, w, labels, chunk=chunk, n_ids=64).backward()
        gradients.append(w.grad.float())
    exact = torch.autograd.grad(
        F.cross_entropy(hidden.double() @ (w := weight.double().requires_grad_()).T, labels, reduction="sum"), w
    )[0]
    errors = [((g - exact).norm() / exact.norm()).item() for g in gradients]
    assert errors[0] < 1.2 * errors[1] < 0.01, errors


def test_rope_scaling_keeps_high_and_stretches_low_frequencies():
    plain = ModelArgs(dim=256, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=4, rope_theta=500_000.0)
    scaled = ModelArgs(
        dim=256, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=4, rope_theta=500_000.0, rope_scaling=RopeScaling()
    )
    a, b = (
        torch.atan2(t[1, :, 1], t[1, :, 0]) for t in (rotary_table(x, 4, torch.device("cpu")) for x in (plain, scaled))
    )
    assert torch.equal(a[:20], b[:20])  # wavelengths far below the original context
    torch.testing.assert_close(a[-5:] / 8, b[-5:])
    assert (b <= a).all() and rotary_table(plain, 4, torch.device("cpu")).dtype == torch.float32


@pytest.mark.parametrize(
    "flavor, billions", [("550M", 0.55), ("7B", 6.7), ("30B", 30), ("70B", 69), ("llama3_8B", 7.5)]
)
def test_flavor_sizes(flavor, billions):
    args = replace(llama_configs[flavor], vocab_size=32_000)
    parameters = args.flops_per_token / 2 + 32_000 * args.dim
    assert parameters / 1e9 == pytest.approx(billions, rel=0.05)
    with torch.device("meta"):
        layer = Transformer(replace(args, vocab_size=128), n_ids=128, max_position=2, layers=range(1, 2))
    assert sum(p.numel() for p in layer.layers.parameters()) == args.layer_flops_per_token / 2 + 2 * args.dim


def test_split_layers_evens_out_the_head():
    assert split_layers(8, 2, 1.0, 0.0) == [range(0, 4), range(4, 8)]
    assert split_layers(9, 2, 1.0, 1.0) == [range(0, 5), range(5, 9)]
    assert [len(r) for r in split_layers(7, 4, 1.0, 2.0)] == [2, 2, 2, 1]
    assert [len(r) for r in split_layers(4, 4, 1.0, 9.0)] == [1, 1, 1, 1]
    assert stages_of(schedule_actions("Interleaved1F1B", 2, 4, 3)[1]) == [1, 3, 5]
    assert stages_of(schedule_actions("ZBVZeroBubble", 4, 8, 2)[1]) == [1, 6]
    assert stages_of(schedule_actions("DualPipeV", 1, 4, 2)[0]) == [0]

"""Time something forward and backward, on any device; attention kernels alone; one rank's share of a block."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtitan_wlb.models.attention import AttentionMeta
from torchtitan_wlb.models.kernels import Kernel, Segments, empty_output
from torchtitan_wlb.models.llama import TransformerBlock
from torchtitan_wlb.models.model_args import ModelArgs

Clock = Callable[[], float]


def medians(
    device: torch.device,
    forward: Callable[[], Any],
    backward: Callable[[Any], object],
    *,
    runs: int = 3,
    least_seconds: float = 0.0,
    clock: Clock = time.perf_counter,
) -> tuple[float, float]:
    """Median milliseconds of (forward, backward of its result).

    Args:
        runs, least_seconds: so many runs, and more until so much time is over; one before them warms up.
        clock: seconds, on a CPU. A GPU's own events time what it does.
    """
    times: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(times) <= runs or time.perf_counter() - began < least_seconds:
        if device.type == "cuda":
            start, between, stop = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            start.record()
            result = forward()
            between.record()
            backward(result)
            stop.record()
            torch.cuda.synchronize()
            times.append((start.elapsed_time(between), between.elapsed_time(stop)))
        else:
            a = clock()
            result = forward()
            b = clock()
            backward(result)
            times.append(((b - a) * 1e3, (clock() - b) * 1e3))
    forwards, backwards = zip(*times[1:])
    return statistics.median(forwards), statistics.median(backwards)


def make_inputs(device, dtype, q: int, k: int, heads: int, kv_heads: int, dim: int) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, random."""
    shapes = ((q, heads), (k, kv_heads), (k, kv_heads), (q, heads))
    return [torch.randn(n, h, dim, device=device, dtype=dtype) for n, h in shapes]


def attend(kernel: Kernel, tensors: list[torch.Tensor], segments: Segments) -> tuple[torch.Tensor, ...]:
    """(output, log-sum-exp) of a kernel."""
    q, k, v, _ = tensors
    out, lse = empty_output(q)
    kernel.forward(q, k, v, segments, out, lse)
    return out, lse


def attend_and_back(kernel: Kernel, tensors: list[torch.Tensor], segments: Segments) -> tuple[torch.Tensor, ...]:
    """(output, dq, dk, dv)."""
    q, k, v, g = tensors
    out, lse = attend(kernel, tensors, segments)
    return out, *kernel.backward(g, q, k, v, out, lse, segments)


def kernel_milliseconds(kernel: Kernel, tensors: list[torch.Tensor], segments: Segments, **how) -> tuple[float, float]:
    """Medians of (forward, backward) of one call; how: see medians."""
    q, k, v, g = tensors
    return medians(
        q.device,
        lambda: attend(kernel, tensors, segments),
        lambda result: kernel.backward(g, q, k, v, *result, segments),
        **how,
    )


class FreeAttention(nn.Module):
    """In the place of a block's attention: takes no time, and still gives every projection a gradient."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        return q + 0 * (k.sum() + v.sum())


def block_share(args: ModelArgs, tp: int, inner_attention: nn.Module) -> TransformerBlock:
    """A block with one tensor-parallel rank's share of every matrix; activations between the matrices stay whole."""
    block = TransformerBlock(replace(args, ffn_dim=args.ffn_dim // tp))
    attention = block.attention
    attention.inner_attention = inner_attention
    heads, kv_heads = args.n_heads // tp, max(1, args.n_kv_heads // tp)
    attention.wq = nn.Linear(args.dim, heads * args.head_dim, bias=False)
    attention.wk = nn.Linear(args.dim, kv_heads * args.head_dim, bias=False)
    attention.wv = nn.Linear(args.dim, kv_heads * args.head_dim, bias=False)
    attention.wo = nn.Linear(heads * args.head_dim, args.dim, bias=False)
    return block

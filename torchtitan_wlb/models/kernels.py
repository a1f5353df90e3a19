"""Attention kernels: causal attention inside segments, several implementations behind one pair of functions.

    forward (q [Tq, Hq, D], k, v [Tk, Hkv, D], segments, out [Tq, Hq, D], lse [Hq, Tq])   fills out and lse
    backward(d_out, q, k, v, out, lse, segments) -> dq, dk, dv

A segment is some queries and the keys that they see, the last query up to the last key (bottom-right causal). Segments
lie end to end and cover all queries and keys given; whoever needs a key twice gives it twice. Hq is a multiple of Hkv.
Whoever calls the pair decides what is saved in between.

`sdpa` is the reference: it loops over segments on views and never builds a Tq x Tk mask. `varlen` (ATen's flash
attention, bundled with torch), `fa3` and `fa4` (which torch puts in its place) and `flash` (the flash-attn package)
take all segments in one call, on CUDA; they have not run on a GPU yet.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import activate_flash_attention_impl

from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import logger
from torchtitan_wlb.torch_private import cpu_flash, cpu_flash_backward, cuda_flash, cuda_flash_backward


@dataclass(frozen=True)
class Segments:
    """Segments end to end: the i-th has the queries [cu_q[i], cu_q[i + 1]) and the keys [cu_k[i], cu_k[i + 1]).

    Attributes:
        cu_q, cu_k: int32 [n + 1] on the device.
        longest_q, longest_k: of one segment.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    longest_q: int
    longest_k: int

    @staticmethod
    def of(queries: Any, keys: Any = None, device: Any = "cpu") -> "Segments":
        """From the sizes of each, ints [n]: queries, and keys (as many as queries by default: whole documents)."""
        keys = queries if keys is None else keys
        cu_q, cu_k = (torch.from_numpy(cumulative(x)).to(device) for x in (queries, keys))
        return Segments(cu_q, cu_k, int(max(queries, default=0)), int(max(keys, default=0)))

    def ranges(self) -> list[tuple[int, int, int, int]]:
        """(q_start, q_stop, k_start, k_stop) of each, for loops on the host."""
        q, k = self.cu_q.tolist(), self.cu_k.tolist()
        return list(zip(q, q[1:], k, k[1:]))


def cumulative(sizes) -> np.ndarray:
    """0 and the running total, int32 [n + 1]."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


@dataclass(frozen=True)
class Kernel:
    """Forward and backward of one kernel; the module docstring gives their arguments."""

    name: str
    forward: Callable[..., None]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def empty_output(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q [T, H, D], lse [H, T] in at least fp32), to be filled."""
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


# FlashAttention of a generation of devices, in the place of ATen's: what torch calls it, the package, the capability.
_IN_PLACE = {"fa3": ("FA3", "flash_attn_interface", (9,)), "fa4": ("FA4", "flash_attn.cute", (9, 10))}


def select_kernel(device_type: str, dtype: torch.dtype, name: str = "auto") -> Kernel:
    """The kernel to use: for "auto" the fastest that is installed for the device and activation type and computes what
    the reference computes. Why others were passed over is logged.

    Raises:
        ConfigError: the named kernel cannot run there, or computes something else.
    """
    half = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if name != "auto":
        candidates = [name]
    else:
        candidates = ["fa4", "fa3", "varlen"] if half else ["sdpa"]
    reasons: list[str] = []
    for candidate in candidates:
        if not (reason := _why_not(candidate, half, f"{device_type} and {dtype}")):
            if name == "auto" and reasons:
                logger.info(f"Attention kernel {candidate} ({'; '.join(reasons)})")
            return KERNELS[candidate]
        reasons.append(f"{candidate}: {reason}")
    raise ConfigError(f"--model.attention {name}: {'; '.join(reasons)}")


def _why_not(name: str, half: bool, where: str) -> str:
    """Why a kernel cannot be used, "" if it can; FlashAttention 3 and 4 take the place of ATen's when they can."""
    if name == "sdpa":
        return ""
    if not half:
        return f"needs CUDA and bf16 or fp16, not {where}"
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        return "needs the flash-attn package: pip install torchtitan_wlb[flash]"
    if name in _IN_PLACE:
        implementation, package, capabilities = _IN_PLACE[name]
        major = torch.cuda.get_device_capability()[0]
        if major not in capabilities:
            return f"not for a device of capability {major}"
        try:
            importlib.import_module(package)
            activate_flash_attention_impl(implementation)
        except Exception as error:  # whatever a package that is not made for this machine says
            return f"{package} cannot be used ({str(error).splitlines()[0][:100]})"
    off_by = relative_error(KERNELS[name], torch.device("cuda"))
    return "" if off_by < LARGEST_ERROR else f"is off by {off_by:.1%} on a small case"


def relative_error(kernel: Kernel, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Largest relative error of a kernel's output and gradients against the reference in fp32: whole documents, one of
    one token, and chunks, with grouped heads."""
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = ((336, 8), (863, 2), (863, 2), (336, 8))
    tensors = [torch.randn(n, h, 64, generator=generator).to(device, dtype) for n, h in sizes]
    segments = Segments.of([130, 1, 77, 128], [130, 1, 300, 432], device)
    results = []
    for k, (q, key, value, g) in ((SDPA, [t.float() for t in tensors]), (kernel, tensors)):
        out, lse = empty_output(q)
        k.forward(q, key, value, segments, out, lse)
        results.append([x.float() for x in (out, *k.backward(g, q, key, value, out, lse, segments))])
    return max(((got - want).norm() / want.norm()).item() for want, got in zip(*results))


# -- sdpa: the reference


def _sdpa_forward(q, k, v, segments: Segments, out, lse) -> None:
    """Segments one by one. A chunk whose queries begin after the first key is two parts: earlier keys without a mask,
    as many keys as queries causal; they are merged by log-sum-exp."""
    part = _cpu_part if q.device.type == "cpu" else _plain_part
    for q0, q1, k0, k1 in segments.ranges():
        qs = _heads_first(q, q0, q1)
        parts = [
            part(qs, _heads_first(k, a, b), _heads_first(v, a, b), causal) for a, b, causal in _parts(q0, q1, k0, k1)
        ]
        (o, l), *rest = parts
        for o2, l2 in rest:
            merged = torch.logaddexp(l, l2)
            o = o * (l - merged).exp()[..., None].to(o.dtype) + o2 * (l2 - merged).exp()[..., None].to(o.dtype)
            l = merged
        out[q0:q1] = o[0].transpose(0, 1)
        lse[:, q0:q1] = l[0]


def _sdpa_backward(d_out, q, k, v, out, lse, segments: Segments):
    """Every part gets the merged output and log-sum-exp, which makes it return its exact share of the gradients."""
    part = _cpu_part_backward if q.device.type == "cpu" else _plain_part_backward
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    for q0, q1, k0, k1 in segments.ranges():
        g, o, l = _heads_first(d_out, q0, q1), _heads_first(out, q0, q1), lse[None, :, q0:q1]
        qs, of_q = _heads_first(q, q0, q1), []
        for a, b, causal in _parts(q0, q1, k0, k1):
            gq, gk, gv = part(g, qs, _heads_first(k, a, b), _heads_first(v, a, b), o, l, causal)
            of_q.append(gq[0].transpose(0, 1))
            dk[a:b], dv[a:b] = gk[0].transpose(0, 1), gv[0].transpose(0, 1)
        dq[q0:q1] = sum(of_q)
    return dq, dk, dv


def _heads_first(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """[T, H, D] rows as a [1, H, rows, D] view."""
    return x[start:stop].transpose(0, 1)[None]


def _parts(q0: int, q1: int, k0: int, k1: int) -> list[tuple[int, int, bool]]:
    """Key ranges of a segment: those before the first query, unmasked, and as many as there are queries, causal."""
    split = k1 - (q1 - q0)
    return [(k0, split, False), (split, k1, True)] if split > k0 else [(k0, k1, True)]


def _cpu_part(q, k, v, causal: bool):
    return cpu_flash(q, k, v, 0.0, causal)


def _cpu_part_backward(g, q, k, v, out, lse, causal: bool):
    return cpu_flash_backward(g, q, k, v, out, lse, 0.0, causal)


_ROWS = 512  # queries whose scores exist at once in the plain part


def _scores(q, k, causal: bool, first: int):
    """Scaled scores [1, H, rows, Tk] in fp32 of the rows from `first` on, -inf above the diagonal if causal."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = torch.matmul(q.float(), k.float().transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if causal:
        rows = torch.arange(first, first + q.shape[2], device=q.device)
        s.masked_fill_(torch.arange(k.shape[2], device=q.device) > rows[:, None], float("-inf"))
    return s


def _plain_part(q, k, v, causal: bool):
    """Textbook attention for any device, some rows at a time."""
    values = v.float().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out, lse = [], []
    for first in range(0, q.shape[2], _ROWS):
        s = _scores(q[:, :, first : first + _ROWS], k, causal, first)
        lse.append(s.logsumexp(-1))
        out.append(torch.matmul((s - lse[-1][..., None]).exp(), values))
    return torch.cat(out, dim=2).to(q.dtype), torch.cat(lse, dim=2)


def _plain_part_backward(g, q, k, v, out, lse, causal: bool):
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1])
    dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.zeros_like(keys), torch.zeros_like(values)
    for first in range(0, q.shape[2], _ROWS):
        rows = slice(first, first + _ROWS)
        g_rows = g[:, :, rows].float()
        p = (_scores(q[:, :, rows], k, causal, first) - lse[:, :, rows, None]).exp()
        ds = p * (
            torch.matmul(g_rows, values.transpose(-1, -2)) - (g_rows * out[:, :, rows].float()).sum(-1, keepdim=True)
        )
        dq[:, :, rows] = torch.matmul(ds, keys) * scale
        dk += torch.matmul(ds.transpose(-1, -2), q[:, :, rows].float()) * scale
        dv += torch.matmul(p.transpose(-1, -2), g_rows)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


SDPA = Kernel("sdpa", _sdpa_forward, _sdpa_backward)


# -- varlen and flash: all segments in one call on CUDA


def _call(s: Segments):
    """What the variable-length kernels are told of segments."""
    return s.cu_q, s.cu_k, s.longest_q, s.longest_k


def _varlen_forward(q, k, v, segments: Segments, out, lse) -> None:
    o, l, *_ = cuda_flash(q, k, v, *_call(segments), 0.0, True, False)
    out.copy_(o)
    lse.copy_(l)


def _varlen_backward(g, q, k, v, out, lse, segments: Segments):
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    unused = torch.empty(0, device=q.device)
    return cuda_flash_backward(g, q, k, v, out, lse.contiguous(), *_call(segments), 0.0, True, state, unused)


def _flash_forward(q, k, v, segments: Segments, out, lse) -> None:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    o, l, *_ = _flash_attn_varlen_forward(q, k, v, *_call(segments), 0.0, q.shape[-1] ** -0.5, causal=True)
    out.copy_(o)
    lse.copy_(l)


def _flash_backward(g, q, k, v, out, lse, segments: Segments):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _flash_attn_varlen_backward(
        *(g, q, k, v, out, lse.contiguous(), dq, dk, dv, *_call(segments)),
        *(0.0, q.shape[-1] ** -0.5, True, -1, -1, 0.0, None, torch.are_deterministic_algorithms_enabled()),
    )
    return dq, dk, dv


VARLEN = Kernel("varlen", _varlen_forward, _varlen_backward)
FLASH = Kernel("flash", _flash_forward, _flash_backward)
KERNELS = {k.name: k for k in (SDPA, VARLEN, FLASH, *(replace(VARLEN, name=name) for name in _IN_PLACE))}
LARGEST_ERROR = 2e-2  # of half precision

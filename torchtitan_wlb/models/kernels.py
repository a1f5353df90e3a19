"""Attention kernels: causal attention inside segments, several implementations behind one pair of functions.

    forward (q [Tq, Hq, D], k, v [Tk, Hkv, D], segments) -> out [Tq, Hq, D], lse [Hq, Tq]
    backward(d_out, q, k, v, out, lse, segments)         -> dq, dk, dv

A segment (q_start, q_stop, k_start, k_stop) lets the queries [q_start, q_stop) attend to the keys [k_start, k_stop),
the last query to the last key (bottom-right causal). Key ranges may overlap. Hq is a multiple of Hkv. Queries outside
every segment come out undefined: the caller uses those of segments only. Whoever calls the pair decides what is saved
in between.

`sdpa` is the reference: it loops over segments on views and never builds a Tq x Tk mask. `varlen` (ATen's flash
attention, bundled with torch) and `flash` (the flash-attn package) take all segments in one call, on CUDA; they have
not run on a GPU yet.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.torch_private import cpu_flash, cpu_flash_backward, cuda_flash, cuda_flash_backward

Segments = list[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Kernel:
    """Forward and backward of one kernel; the module docstring gives their arguments."""

    name: str
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def select_kernel(device_type: str, dtype: torch.dtype, name: str = "auto") -> Kernel:
    """The kernel to use: for "auto" the fastest for a device and activation type.

    Raises:
        ConfigError: the named kernel cannot run there.
    """
    half = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if name == "auto":
        name = "varlen" if half else "sdpa"
    if name in ("varlen", "flash") and not half:
        raise ConfigError(f"--model.attention {name} needs CUDA and bf16 or fp16, not {device_type} and {dtype}")
    if name == "flash" and not has_flash:
        raise ConfigError("--model.attention flash needs the flash-attn package: pip install torchtitan_wlb[flash]")
    return {"sdpa": SDPA, "varlen": VARLEN, "flash": FLASH}[name]


# -- sdpa: the reference


def _sdpa_forward(q, k, v, segments: Segments):
    """Segments one by one. A chunk whose queries begin after the first key is two parts: earlier keys without a mask,
    as many keys as queries causal; they are merged by log-sum-exp."""
    part = _cpu_part if q.device.type == "cpu" else _plain_part
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for q0, q1, k0, k1 in segments:
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
    return out, lse


def _sdpa_backward(d_out, q, k, v, out, lse, segments: Segments):
    """Every part gets the merged output and log-sum-exp, which makes it return its exact share of the gradients."""
    part = _cpu_part_backward if q.device.type == "cpu" else _plain_part_backward
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for q0, q1, k0, k1 in segments:
        g, o, l = _heads_first(d_out, q0, q1), _heads_first(out, q0, q1), lse[None, :, q0:q1]
        qs = _heads_first(q, q0, q1)
        for a, b, causal in _parts(q0, q1, k0, k1):
            gq, gk, gv = part(g, qs, _heads_first(k, a, b), _heads_first(v, a, b), o, l, causal)
            dq[q0:q1] += gq[0].transpose(0, 1)
            dk[a:b] += gk[0].transpose(0, 1)
            dv[a:b] += gv[0].transpose(0, 1)
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


def _gather(q, k, segments: Segments):
    """What a variable-length kernel wants: (rows of q in use, rows of k, cumulative lengths of both, longest of
    both)."""
    rows = [torch.arange(q0, q1) for q0, q1, _, _ in segments]
    keys = [torch.arange(k0, k1) for _, _, k0, k1 in segments]
    cumulative = []
    for x in (rows, keys):
        cumulative.append(F.pad(torch.tensor([len(r) for r in x]).cumsum(0), (1, 0)).to(torch.int32))
    longest = max(len(r) for r in rows), max(len(r) for r in keys)
    move = [x.to(q.device, non_blocking=True) for x in (torch.cat(rows), torch.cat(keys), *cumulative)]
    return *move, longest


def _packed_forward(call):
    def forward(q, k, v, segments: Segments):
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        if segments:
            rows, keys, cu_q, cu_k, longest = _gather(q, k, segments)
            o, l = call(q[rows], k[keys], v[keys], cu_q, cu_k, longest)
            out[rows], lse[:, rows] = o, l
        return out, lse

    return forward


def _packed_backward(call):
    def backward(d_out, q, k, v, out, lse, segments: Segments):
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        if segments:
            rows, keys, cu_q, cu_k, longest = _gather(q, k, segments)
            saved = (q[rows], k[keys], v[keys], out[rows], lse[:, rows].contiguous(), cu_q, cu_k, longest)
            gq, gk, gv = call(d_out[rows], *saved)
            dq[rows] = gq
            dk.index_add_(0, keys, gk)
            dv.index_add_(0, keys, gv)
        return dq, dk, dv

    return backward


def _aten_forward(q, k, v, cu_q, cu_k, longest):
    out, lse, *_ = cuda_flash(q, k, v, cu_q, cu_k, *longest, 0.0, True, False)
    return out, lse


def _aten_backward(g, q, k, v, out, lse, cu_q, cu_k, longest):
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    return cuda_flash_backward(
        g, q, k, v, out, lse, cu_q, cu_k, *longest, 0.0, True, state, torch.empty(0, device=q.device)
    )


def _flash_forward(q, k, v, cu_q, cu_k, longest):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    out, lse, *_ = _flash_attn_varlen_forward(q, k, v, cu_q, cu_k, *longest, 0.0, q.shape[-1] ** -0.5, causal=True)
    return out, lse


def _flash_backward(g, q, k, v, out, lse, cu_q, cu_k, longest):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _flash_attn_varlen_backward(
        g, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, *longest, 0.0, q.shape[-1] ** -0.5, True, -1, -1, 0.0, None, False
    )
    return dq, dk, dv


VARLEN = Kernel("varlen", _packed_forward(_aten_forward), _packed_backward(_aten_backward))
FLASH = Kernel("flash", _packed_forward(_flash_forward), _packed_backward(_flash_backward))

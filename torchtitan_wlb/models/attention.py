"""The attention seam: causal attention inside segments, several kernels behind one signature.

    attention(q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, D], segments) -> [Tq, Hq, D]

A segment (q_start, q_stop, k_start, k_stop) lets the queries [q_start, q_stop) attend to the keys [k_start, k_stop),
the last query to the last key (bottom-right causal). Key ranges may overlap. Queries of no segment (padding) get zeros
and no gradient. Hq is a multiple of Hkv.

`sdpa` is the reference: it loops over segments on views and never builds a Tq x Tk mask. `varlen` is torch's
variable-length flash attention on CUDA (it has not run in this repository's tests, which have no GPU).
"""

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F

Segments = list[tuple[int, int, int, int]]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments], torch.Tensor]

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def select_attention(device_type: str, dtype: torch.dtype) -> tuple[str, Attention]:
    """(name, function) of the fastest kernel for a device and activation type."""
    if device_type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return "varlen", varlen
    return "sdpa", sdpa


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Reference kernel for any device; see the module docstring for shapes."""
    if q.device.type == "cpu":
        return _CpuAttention.apply(q, k, v, segments)
    out = torch.zeros_like(q)
    for q0, q1, k0, k1 in segments:
        from torch.nn.attention.bias import causal_lower_right

        qs, ks, vs = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        mask = causal_lower_right(q1 - q0, k1 - k0)
        out[q0:q1] = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    return out


class _CpuAttention(torch.autograd.Function):
    """Segments through ATen's flash kernel for CPU.

    Its causal mode aligns the first query with the first key, so a chunk whose queries begin at key a = Tk - Tq is two
    calls: keys [0, a) without a mask and keys [a, Tk) causal, merged by log-sum-exp. In backward both calls get the
    merged output and log-sum-exp, which makes each return its exact share of the gradients. Saved: q, k, v, output and
    log-sum-exp.
    """

    @staticmethod
    def forward(ctx, q, k, v, segments):
        out = torch.zeros_like(q)
        lse = q.new_zeros(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
        for q0, q1, k0, k1 in segments:
            parts = [
                _flash_cpu(_bhtd(q, q0, q1), _bhtd(k, a, b), _bhtd(v, a, b), 0.0, causal)
                for a, b, causal in _parts(q0, q1, k0, k1)
            ]
            (o, l), *rest = parts
            if rest:
                ((o2, l2),) = rest
                merged = torch.logaddexp(l, l2)
                o = o * (l - merged).exp()[..., None].to(o.dtype) + o2 * (l2 - merged).exp()[..., None].to(o.dtype)
                l = merged
            out[q0:q1] = o[0].transpose(0, 1)
            lse[:, q0:q1] = l[0]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments = segments
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for q0, q1, k0, k1 in ctx.segments:
            g, o, l = _bhtd(grad_out, q0, q1), _bhtd(out, q0, q1), lse[None, :, q0:q1]
            for a, b, causal in _parts(q0, q1, k0, k1):
                gq, gk, gv = _flash_cpu_backward(g, _bhtd(q, q0, q1), _bhtd(k, a, b), _bhtd(v, a, b), o, l, 0.0, causal)
                dq[q0:q1] += gq[0].transpose(0, 1)
                dk[a:b] += gk[0].transpose(0, 1)
                dv[a:b] += gv[0].transpose(0, 1)
        return dq, dk, dv, None


def _bhtd(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """[T, H, D] rows as a [1, H, rows, D] view."""
    return x[start:stop].transpose(0, 1)[None]


def _parts(q0: int, q1: int, k0: int, k1: int) -> list[tuple[int, int, bool]]:
    """Key ranges of a segment: those before the first query, unmasked, and as many as there are queries, causal."""
    split = k1 - (q1 - q0)
    return [(k0, split, False), (split, k1, True)] if split > k0 else [(k0, k1, True)]


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
    """torch.nn.attention.varlen over all segments in one call (CUDA, bf16 or fp16). Keys are gathered, so ranges may
    overlap."""
    from torch.nn.attention.varlen import varlen_attn

    if not segments:
        return torch.zeros_like(q)
    q_lengths = torch.tensor([q1 - q0 for q0, q1, _, _ in segments], dtype=torch.int32)
    k_lengths = torch.tensor([k1 - k0 for _, _, k0, k1 in segments], dtype=torch.int32)
    n_queries = int(q_lengths.sum())
    # Segments are in local query order and padding comes last, so the queries in use are a prefix.
    assert segments[0][0] == 0 and segments[-1][1] == n_queries
    keys = torch.cat([torch.arange(k0, k1) for _, _, k0, k1 in segments]).to(k.device, non_blocking=True)
    cu_q, cu_k = (
        F.pad(x.cumsum(0, dtype=torch.int32), (1, 0)).to(q.device, non_blocking=True) for x in (q_lengths, k_lengths)
    )
    # The causal switch has changed its name between torch versions: a window of (-1, 0), or is_causal.
    names = inspect.signature(varlen_attn).parameters
    causal: dict = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        causal["enable_gqa"] = q.shape[1] != k.shape[1]
    out: torch.Tensor = varlen_attn(
        q[:n_queries], k.index_select(0, keys), v.index_select(0, keys),
        cu_q, cu_k, int(q_lengths.max()), int(k_lengths.max()), **causal,
    )  # type: ignore[assignment]  # fmt: skip
    return F.pad(out, (0, 0, 0, 0, 0, q.shape[0] - n_queries))

"""Rotary positions: the table, for windows that a model was trained for or not, and the rotation.

Feature i of a head turns together with feature i + D/2, as in Hugging Face's files; Meta's own files pair neighbours.
"""

import math

import torch

from torchtitan_wlb.models.model_args import ModelArgs, RopeScaling


def _stretch(freqs: torch.Tensor, theta: float, s: RopeScaling) -> tuple[torch.Tensor, float]:
    """(frequencies [D/2], factor of cos and sin)."""
    if s.kind == "linear":
        return freqs / s.factor, 1.0
    if s.kind == "llama3":
        turns = s.original_context * freqs / (2 * math.pi)
        keep = ((turns - s.low) / (s.high - s.low)).clamp(0, 1)
        return freqs * (keep + (1 - keep) / s.factor), 1.0
    n = len(freqs)
    # Features that turn `fast` and `slow` times in the original context.
    first, last = (n * math.log(s.original_context / (x * 2 * math.pi)) / math.log(theta) for x in (s.fast, s.slow))
    first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * n - 1)
    index = torch.arange(n, dtype=freqs.dtype, device=freqs.device)
    ramp = ((index - first) / max(last - first, 1e-3)).clamp(0, 1)
    grown = s.attention_factor or 0.1 * math.log(max(s.factor, 1.0)) + 1
    return freqs * (1 - ramp) + freqs / s.factor * ramp, grown


def rotary_table(args: ModelArgs, n_positions: int, device: torch.device) -> torch.Tensor:
    """cos and sin of every position and frequency, fp32 [n_positions, head_dim / 2, 2]."""
    d, scaling = args.head_dim, args.rope_scaling
    freqs = args.rope_theta ** -(torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)
    freqs, grown = _stretch(freqs, args.rope_theta, scaling) if scaling else (freqs, 1.0)
    angles = torch.arange(n_positions, dtype=torch.float64, device=device)[:, None] * freqs
    return (grown * torch.stack([angles.cos(), angles.sin()], dim=-1)).float()


def apply_rotary(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Turn features (i, i + D/2) as complex numbers. x: [1, T/CP, H/TP, D], rope: [T/CP, D/2, 2]."""
    pairs = x.to(torch.promote_types(x.dtype, rope.dtype)).unflatten(-1, (2, -1))
    if torch.compiler.is_compiling():  # the compiler fuses real arithmetic only
        (a, b), (cos, sin) = pairs.unbind(-2), rope[:, None].unbind(-1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    else:  # not by torch.complex(a, b), which keeps both for backward
        numbers = torch.view_as_complex(pairs.transpose(-1, -2).contiguous())
        turned = torch.view_as_real(numbers * torch.view_as_complex(rope)[:, None]).transpose(-1, -2).flatten(-2)
    return turned.to(x.dtype)

"""The cost model of a run: analytic from a named device, or from a file that scripts/profile_costs.py measured."""

import json
from pathlib import Path

import numpy as np

from torchtitan_wlb.config import ConfigError
from torchtitan_wlb.logger import logger
from torchtitan_wlb.models.llama import ModelArgs
from torchtitan_wlb.packing.cost_model import BACKWARD_ATTENTION, DEVICES, CostModel, analytic_cost_model


def detect_device(configured: str) -> str:
    """Key of DEVICES: the configured one, or for "auto" the one of this machine (h100 for CUDA devices without rates of
    their own)."""
    if configured != "auto":
        return configured
    import torch

    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else "cpu"
    return next((key for key in DEVICES if key in name), "h100")


def build_cost_model(profile: str, device: str, args: ModelArgs, *, tp: int, cp: int) -> CostModel:
    """The profiled cost model if there is a profile, else the analytic one.

    Raises:
        ConfigError: the profile cannot be read, or was measured for another model or layout.
    """
    if profile:
        return read_profile(profile, args, tp=tp, cp=cp)
    return analytic_cost_model(
        DEVICES[device],
        layers=args.n_layers,
        dim=args.dim,
        kv_dim=args.n_kv_heads * args.head_dim,
        linear_flops_per_token=args.linear_flops_per_token(args.vocab_size),
        head_flops_per_token=args.head_flops_per_token(args.vocab_size),
        attention_flops_per_pair=args.attention_flops_per_pair(),
        tp=tp,
        cp=cp,
    )


def read_profile(path: str, args: ModelArgs, *, tp: int, cp: int) -> CostModel:
    """Cost model from measured times: attention rates at the measured document lengths, a straight line for everything
    else.

    Lengths outside the measured ones get the nearest rate, and the log says how far it reaches.
    """
    try:
        measured = json.loads(Path(path).read_text())
        shape = {k: measured["model"][k] for k in ("dim", "n_heads", "n_kv_heads", "ffn_dim")}
        whole = sorted((r["q"], r["forward_ms"] + r["backward_ms"]) for r in measured["attention"] if r["q"] == r["k"])
        rest = np.array(
            [(r["tokens"], r["layer_ms"] * args.n_layers + r["head_ms"], r["head_ms"]) for r in measured["linear"]]
        )
        measured_tp = measured["tp"]
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"--cost_model.profile {path}: not a profile of scripts/profile_costs.py ({error!r})"
        ) from error
    if shape != {k: getattr(args, k) for k in shape} or measured_tp != tp:
        raise ConfigError(
            f"--cost_model.profile {path}: measured for {shape} and tensor parallel degree {measured_tp}, "
            f"not for this model and {tp}"
        )
    knots, ms = zip(*whole)
    layer_pair_flops = args.layer_flops_per_pair * (1 + BACKWARD_ATTENTION) / tp
    rates = tuple(layer_pair_flops * d * (d + 1) / 2 / (t * 1e-3) for d, t in zip(knots, ms))
    # Relative error counts, so the short ones weigh as much as the long ones.
    slope, fixed = np.polyfit(rest[:, 0], rest[:, 1], 1, w=1 / rest[:, 1])
    logger.info(
        f"Profile {path}: {measured['device']}, attention measured for documents of {knots[0]} to {knots[-1]} tokens"
    )
    return CostModel(
        pair_flops=args.n_layers * layer_pair_flops / cp,
        token_cost=float(slope) * 1e-3 / cp,
        knots=tuple(int(k) for k in knots),
        rates=rates,
        fixed_cost=max(0.0, float(fixed) * 1e-3),
        head_share=float(np.mean(rest[:, 2] / rest[:, 1])),
    )

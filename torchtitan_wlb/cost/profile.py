"""Costs measured by scripts/profile_costs.py: a file, read once, that gives the cost model and the kernel cost."""

import hashlib
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from torchtitan_wlb.cost.cost_model import BACKWARD_ATTENTION, CostModel, analytic_cost_model, traffic
from torchtitan_wlb.cost.devices import DEVICES, Device
from torchtitan_wlb.cost.kernel_cost import KernelCost, analytic_kernel_cost, measured_kernel_cost
from torchtitan_wlb.cost.model_shape import ModelShape
from torchtitan_wlb.errors import ConfigError, first_reason


class _Row(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)


class AttentionRow(_Row):
    """Milliseconds of one layer's attention of q queries, the last of which sees k keys."""

    q: PositiveInt
    k: PositiveInt
    forward_ms: PositiveFloat
    backward_ms: PositiveFloat


class LinearRow(_Row):
    """Milliseconds, forward and backward, of some tokens in a layer without its attention, and in head and loss."""

    tokens: PositiveInt
    layer_ms: PositiveFloat
    head_ms: PositiveFloat


class ProfiledModel(_Row):
    """What a profile must agree with."""

    dim: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int


class Profile(_Row):
    """A profile; tp is the tensor-parallel degree whose share of a layer was measured."""

    device: str
    model: ProfiledModel
    tp: PositiveInt
    attention: list[AttentionRow] = Field(min_length=1)
    linear: list[LinearRow] = Field(min_length=2)

    @property
    def content(self) -> str:
        """Hash of what was measured."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def cost_model(self, shape: ModelShape, device: Device, *, cp: int, bytes_per_value: int = 2) -> CostModel:
        """Attention rates at the measured document lengths (outside of them the nearest), a straight line for
        everything else, and what ranks send each other, which was not measured, by the link of a device."""
        whole = sorted((r.q, r.forward_ms + r.backward_ms) for r in self.attention if r.q == r.k)
        layer_pair_flops = shape.layer_flops_per_pair * (1 + BACKWARD_ATTENTION) / self.tp
        rest = np.array([(r.tokens, r.layer_ms * shape.n_layers + r.head_ms, r.head_ms) for r in self.linear])
        # Relative error counts, so the short ones weigh as much as the long ones.
        slope, fixed = np.polyfit(rest[:, 0], rest[:, 1], 1, w=1 / rest[:, 1])
        compute = float(slope) * 1e-3 / cp
        a_token, a_micro_batch = traffic(device, shape, tp=self.tp, cp=cp, bytes_per_value=bytes_per_value)
        return CostModel(
            pair_flops=shape.n_layers * layer_pair_flops / cp,
            token_cost=compute + a_token,
            knots=tuple(d for d, _ in whole),
            rates=tuple(layer_pair_flops * d * (d + 1) / 2 / (t * 1e-3) for d, t in whole),
            fixed_cost=max(0.0, float(fixed) * 1e-3) + a_micro_batch,
            head_share=float(np.mean(rest[:, 2] / rest[:, 1])) * compute / (compute + a_token),
        )


def read_profile(path: str, shape: ModelShape, *, tp: int) -> Profile | None:
    """The profile of a file, None for "".

    Raises:
        ConfigError: it cannot be read, is not a profile, or was measured for another model or layout.
    """
    if not path:
        return None
    flag = f"--cost_model.profile {path}"
    try:
        profile = Profile.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{flag}: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(f"{flag}: not a profile of scripts/profile_costs.py ({first_reason(error)})") from error
    measured = profile.model.model_dump()
    if measured != {k: getattr(shape, k) for k in measured} or profile.tp != tp:
        raise ConfigError(
            f"{flag}: measured for {measured} and tensor parallel degree {profile.tp}, not for this model and {tp}"
        )
    if not any(r.q == r.k for r in profile.attention):
        raise ConfigError(f"{flag}: no attention row of a whole document (q = k)")
    return profile


def build_cost_model(profile: Profile | None, device: str, shape: ModelShape, *, tp: int, cp: int) -> CostModel:
    """The profiled cost model if there is a profile, else the analytic one of a device (a key of DEVICES)."""
    if profile:
        return profile.cost_model(shape, DEVICES[device], cp=cp)
    return analytic_cost_model(DEVICES[device], shape, tp=tp, cp=cp)


def build_kernel_cost(
    profile: Profile | None, device: str, shape: ModelShape, *, tp: int, cp: int, bytes_per_value: int
) -> KernelCost:
    """Cost of one layer's attention on one rank: measured if there is a profile, else analytic; the exchange is
    analytic in both."""
    pair_flops = shape.layer_flops_per_pair * (1 + BACKWARD_ATTENTION) / tp
    analytic = analytic_kernel_cost(DEVICES[device], pair_flops, 2 * shape.kv_dim / tp * bytes_per_value, tp * cp)
    if not profile:
        return analytic
    rows = [(r.q, r.k, (r.forward_ms + r.backward_ms) * 1e-3) for r in profile.attention]
    return measured_kernel_cost(rows, pair_flops, analytic.token_seconds, analytic.latency)

"""Predicted time of documents, forward and backward: attention W_a(d) plus everything else W_l(d) (WLB-LLM §4.1).

    seconds(d) = pair_flops x d (d + 1) / 2 / rate(d)  +  token_cost x d

rate(d) is what the attention kernel reaches on a document of d tokens, interpolated between knots (log-log). What
decides packing is frozen at the first step of a run, so the model is a handful of plain numbers.
"""

import math
from dataclasses import dataclass

import numpy as np

from torchtitan_wlb.cost.devices import Device
from torchtitan_wlb.cost.model_shape import ModelShape

BACKWARD_MATMUL, BACKWARD_ATTENTION = 2.0, 2.5  # FLOPs of backward / forward; attention recomputes its scores


FROM_FILE = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # for pydantic, where a checkpoint is read


@dataclass(frozen=True)
class CostModel:
    """Seconds of a document through all layers on one rank.

    Attributes:
        pair_flops: FLOPs of one attended (query, key) pair, forward and backward.
        token_cost: seconds of one token in everything but attention.
        knots, rates: attention FLOP/s at document lengths. Outside the knots the nearest rate is used.
        fixed_cost: seconds of a micro-batch that do not depend on its documents.
        head_share: of token_cost, what the output head and the loss take.
    """

    pair_flops: float
    token_cost: float
    knots: tuple[int, ...]
    rates: tuple[float, ...]
    fixed_cost: float = 0.0
    head_share: float = 0.0

    __pydantic_config__ = FROM_FILE

    def __post_init__(self):
        least = min(self.pair_flops, self.token_cost, *self.knots, *self.rates)
        if least <= 0 or min(self.fixed_cost, self.head_share) < 0 or len(self.knots) != len(self.rates):
            raise ValueError("costs must be positive, with one rate for every knot")

    @staticmethod
    def of_equal_length(tokens: float) -> "CostModel":
        """Costs in units of a token's linear work, attention as dear as the rest for a document of some tokens."""
        return CostModel(pair_flops=2 / (tokens + 1), token_cost=1.0, knots=(1,), rates=(1.0,))

    def attention(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds of attention of whole documents, [n] for lengths [n]."""
        d = np.asarray(lengths, dtype=np.float64)
        rate = np.exp(np.interp(np.log(np.maximum(d, 1)), np.log(self.knots), np.log(self.rates)))
        return self.pair_flops * d * (d + 1) / 2 / rate

    def documents(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds of whole documents, [n] for lengths [n]."""
        return self.attention(lengths) + self.token_cost * np.asarray(lengths)

    def equal_length(self) -> float:
        """Document length in tokens at which attention costs as much as everything else."""
        low, high = 1.0, 1e9
        for _ in range(100):
            middle = math.sqrt(low * high)
            more = float(self.attention(np.array([middle]))[0]) > self.token_cost * middle
            low, high = (low, middle) if more else (middle, high)
        return low


def traffic(device: Device, shape: ModelShape, *, tp: int, cp: int, bytes_per_value: int = 2) -> tuple[float, float]:
    """What ranks send each other, forward and backward: (seconds a token of the micro-batch, seconds a micro-batch).

    Tensor parallelism with sequence parallelism gathers and scatters the activations of every token four times a layer
    forward and four times backward. What context parallelism sends depends on the shard plan and counts where that is
    known (context_parallel/selection.py). FSDP's gathers hide behind compute and are the same for every micro-batch.
    """
    in_layer = 8 * (tp - 1) / tp * shape.dim * bytes_per_value / cp
    return shape.n_layers * in_layer / device.reach(tp), shape.n_layers * 8 * device.latency * (tp > 1)


def analytic_cost_model(
    device: Device, shape: ModelShape, *, tp: int = 1, cp: int = 1, bytes_per_value: int = 2
) -> CostModel:
    """Cost model from the FLOPs of a model, shared by TP x CP ranks, the rates of a device and the traffic of a layout.

    Args:
        shape: of the model, with the vocabulary resolved.
        tp, cp: of the layout. bytes_per_value: of activations.
    """
    matmul = shape.flops_per_token * (1 + BACKWARD_MATMUL) / device.matmul / (tp * cp)
    a_token, a_micro_batch = traffic(device, shape, tp=tp, cp=cp, bytes_per_value=bytes_per_value)
    return CostModel(
        pair_flops=shape.flops_per_pair * (1 + BACKWARD_ATTENTION) / (tp * cp),
        token_cost=matmul + a_token,
        knots=device.knots,
        rates=device.rates,
        fixed_cost=a_micro_batch,
        head_share=matmul * shape.head_flops_per_token / shape.flops_per_token / (matmul + a_token),
    )


def imbalance(work) -> float:
    """max / mean: 1.0 is perfect (WLB-LLM §1)."""
    total = float(np.sum(work))
    return float(np.max(work)) * len(work) / total if total else 1.0

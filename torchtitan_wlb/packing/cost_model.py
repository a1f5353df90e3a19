"""Predicted time of documents, forward and backward: attention W_a(d) plus everything else W_l(d) (WLB-LLM §4.1).

    seconds(d) = pair_flops x d (d + 1) / 2 / rate(d)  +  token_cost x d

rate(d) is what the attention kernel reaches on a document of d tokens, interpolated between knots (log-log). What
decides packing is frozen at the first step of a run, so the model is a handful of plain numbers.
"""

import math
from dataclasses import dataclass

import numpy as np

BACKWARD_MATMUL, BACKWARD_ATTENTION = 2.0, 2.5  # FLOPs of backward / forward; attention recomputes its scores


@dataclass(frozen=True)
class Device:
    """Rates of a kind of device.

    Attributes:
        matmul: FLOP/s of matrix products in training.
        knots, rates: FLOP/s of attention, forward and backward together, on one document by its length.
        link, latency: bytes/s a device can send to its neighbours (tensor and context parallelism), seconds a
            collective takes at least.
        tile: queries of a kernel tile; a shorter chunk costs a whole one.
    """

    matmul: float
    knots: tuple[int, ...]
    rates: tuple[float, ...]
    link: float
    latency: float
    tile: int


def _tflops(*values: float) -> tuple[float, ...]:
    return tuple(v * 1e12 for v in values)


# cpu: one core of a 2-core x86 CPU in fp32, measured with scripts/profile_costs.py (debugmodel at 8K). h100 (bf16): the
# shape of the attention curve is our fit of a published forward curve (130 TFLOP/s at 1K tokens, 260 at 4K, 341 at 64K,
# head dimension 128), shorter lengths by tiles of 128 queries, times 0.68 for forward and backward together; matrix
# products 550 TFLOP/s, NVLink 380 GB/s. With these, attention of one document equals its linear part at about 28K
# tokens for 7B with TP=8, where the WLB-LLM paper profiles it. h200: the same chip, more memory.
_H100 = Device(
    matmul=550e12,
    knots=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072),
    rates=_tflops(30, 51, 71, 88, 132, 177, 202, 221, 230, 232),
    link=380e9,
    latency=15e-6,
    tile=128,
)
DEVICES = {
    "cpu": Device(
        matmul=58e9,
        knots=(64, 256, 512, 1024, 2048, 8192),
        rates=(10e9, 30e9, 41e9, 62e9, 81e9, 98e9),
        link=4e9,
        latency=50e-6,
        tile=1,
    ),
    "h100": _H100,
    "h200": _H100,
}


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


def analytic_cost_model(
    device: Device,
    *,
    layers: int,
    dim: int,
    kv_dim: int,
    linear_flops_per_token: float,
    head_flops_per_token: float,
    attention_flops_per_pair: float,
    tp: int = 1,
    cp: int = 1,
    bytes_per_value: int = 2,
) -> CostModel:
    """Cost model from the FLOPs of a model, the rates of a device and the traffic of a layout.

    Compute is shared by TP x CP ranks. Tensor parallelism with sequence parallelism gathers and scatters the
    activations of every token four times a layer forward and four times backward; context parallelism moves keys and
    values of every token once in each direction. FSDP's gathers hide behind compute and are the same for every
    micro-batch: left out.

    Args:
        linear_flops_per_token: forward FLOPs of one token in all matrix products of the model.
        head_flops_per_token: of these, in the output head.
        attention_flops_per_pair: forward FLOPs of one attended (query, key) pair, all layers and heads.
        layers, dim, kv_dim: of the model; tp, cp: of the layout; bytes_per_value: of activations.
    """
    matmul = linear_flops_per_token * (1 + BACKWARD_MATMUL) / device.matmul / (tp * cp)
    tp_bytes = 8 * (tp - 1) / tp * dim * bytes_per_value / cp
    cp_bytes = 2 * 2 * (cp - 1) / cp * kv_dim / tp * bytes_per_value
    token_cost = matmul + layers * (tp_bytes + cp_bytes) / device.link
    return CostModel(
        pair_flops=attention_flops_per_pair * (1 + BACKWARD_ATTENTION) / (tp * cp),
        token_cost=token_cost,
        knots=device.knots,
        rates=device.rates,
        fixed_cost=layers * device.latency * (8 * (tp > 1) + 2 * (cp > 1)),
        head_share=matmul * head_flops_per_token / linear_flops_per_token / token_cost,
    )


def imbalance(work) -> float:
    """max / mean: 1.0 is perfect (WLB-LLM §1)."""
    total = float(np.sum(work))
    return float(np.max(work)) * len(work) / total if total else 1.0

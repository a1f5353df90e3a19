"""Predicted time of documents: W_a(d) + W_l(d), attention (quadratic) plus everything else (linear), forward and
backward.

    seconds(d) = pair_cost x d (d + 1) / 2  +  token_cost x d

The two coefficients decide packing, so a run freezes them at its first step. Only their ratio matters to balance: the
document length at which both parts are equal is 2 x token_cost / pair_cost.
"""

from dataclasses import dataclass

# Achieved rates in FLOP/s: (matrix products, attention over long documents), forward + backward.
#   cpu: one core of a 2-core x86 CPU, fp32, measured (36 GFLOP/s matrix products, causal SDPA 12 at 512 tokens to 27 at
# 8K). h100: bf16. Attention from published forward curves (341 TFLOP/s at 64K); the ratio to matrix products is set so
# that for 7B the attention of one document equals its linear part at about 28K tokens, as the WLB-LLM paper profiles
# it. h200: same compute.
RATES = {"cpu": (36e9, 18e9), "h100": (520e12, 345e12), "h200": (520e12, 345e12)}
BACKWARD_MATMUL, BACKWARD_ATTENTION = 2.0, 2.5  # backward / forward; attention recomputes its scores


@dataclass(frozen=True)
class CostModel:
    """Seconds of one (query, key) pair and of one token, through all layers, forward and backward, on one device."""

    pair_cost: float
    token_cost: float

    def document(self, d: int) -> float:
        """Seconds of a document of d tokens."""
        return self.pair_cost * (d * (d + 1) // 2) + self.token_cost * d

    def work(self, attended_pairs: float, tokens: float) -> float:
        """Seconds of a micro-batch; tokens include padding, which costs linear work only."""
        return self.pair_cost * attended_pairs + self.token_cost * tokens


def analytic_cost_model(linear_flops_per_token: float, attention_flops_per_pair: float, device: str) -> CostModel:
    """Cost model from forward FLOPs of a model and the rates of a device.

    Args:
        linear_flops_per_token: forward FLOPs of one token in all matrix products.
        attention_flops_per_pair: forward FLOPs of one attended (query, key) pair, all layers and heads.
        device: a key of RATES.
    """
    matmul, attention = RATES[device]
    return CostModel(
        pair_cost=attention_flops_per_pair * (1 + BACKWARD_ATTENTION) / attention,
        token_cost=linear_flops_per_token * (1 + BACKWARD_MATMUL) / matmul,
    )


def imbalance(work: list[float]) -> float:
    """max / mean: 1.0 is perfect (WLB-LLM §1)."""
    total = sum(work)
    return max(work) * len(work) / total if total else 1.0

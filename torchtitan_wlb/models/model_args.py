"""What a decoder is: sizes, and what its arithmetic needs to know beside them; some by name."""

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_wlb.cost.model_shape import ModelShape


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are stretched for windows beyond original_context.

    Attributes:
        kind: "linear" stretches all by factor; "llama3" (arXiv 2407.21783) those of more than low, "yarn" (arXiv
            2309.00071) those of fewer turns than `fast` in original_context, with a smooth passage.
        low, high: llama3: wavelengths above original_context / low are stretched, below original_context / high not.
        fast, slow: yarn: features that turn more often than `fast` times in original_context are not stretched, those
            that turn less often than `slow` times wholly.
        attention_factor: yarn: of cos and sin; 0: 0.1 ln(factor) + 1.
    """

    kind: Literal["linear", "llama3", "yarn"] = "llama3"
    factor: float = 8.0
    original_context: int = 8192
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float = 0.0


@dataclass(frozen=True)
class ModelArgs(ModelShape):
    """A decoder of the Llama kind: RMSNorm before attention and feed-forward, grouped-query attention, SwiGLU, rotary
    positions.

    Attributes:
        family: model_type of Hugging Face.
        n_ids: ids in use; rows of the vocabulary above are padding.
        trained_context: tokens of the longest document that a pretrained model has seen, 0 where that is not known.
        has_qkv_bias: projections to q, k and v have a bias (Qwen2).
        has_qk_norm: q and k of every head are normed before they are turned (Qwen3).
    """

    family: str = "llama"
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    n_ids: int = 0
    trained_context: int = 0


VOCAB_MULTIPLE = 128  # so that weights fit every tensor-parallel degree
_LLAMA3: dict[str, Any] = {"rope_theta": 500_000.0, "rope_scaling": RopeScaling(), "vocab_size": 128_256}
_LLAMA3 |= {"trained_context": 131_072}
_QWEN3: dict[str, Any] = {"family": "qwen3", "has_qk_norm": True, "head_dim": 128, "rope_theta": 1e6, "norm_eps": 1e-6}
_QWEN3 |= {"vocab_size": 151_936, "trained_context": 32_768}
llama_configs = {
    "debugmodel": ModelArgs(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=384),
    "debugmodel_wide": ModelArgs(dim=2048, n_layers=1, n_heads=16, n_kv_heads=8, ffn_dim=6144),
    # For scripts/benchmark_step.py: small models for which, on a CPU, long documents are as much dearer as for the 7B
    # on an H100. A token of an 8K document costs these three 5 to 7 times as much as one of a document of 64 tokens;
    # for the 7B and a document of 128K the cost model says 5.1 to 5.5 times.
    "debugmodel_long": ModelArgs(dim=128, n_layers=4, n_heads=8, n_kv_heads=2, ffn_dim=256),
    "debugmodel_longer": ModelArgs(dim=256, n_layers=4, n_heads=16, n_kv_heads=4, ffn_dim=256),
    "debugmodel_small": ModelArgs(dim=64, n_layers=4, n_heads=4, n_kv_heads=1, ffn_dim=64),
    "debugmodel_deep": ModelArgs(dim=64, n_layers=8, n_heads=4, n_kv_heads=1, ffn_dim=192),
    "550M": ModelArgs(dim=1536, n_layers=16, n_heads=12, n_kv_heads=12, ffn_dim=4096),
    "7B": ModelArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008),
    "30B": ModelArgs(dim=7168, n_layers=48, n_heads=56, n_kv_heads=56, ffn_dim=19456),
    "70B": ModelArgs(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
    # Released models: the same as a folder with their config.json, for recipes that are read before it is there.
    "llama3_1B": ModelArgs(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=8192,
        is_tied=True,
        **_LLAMA3 | {"rope_scaling": RopeScaling(factor=32.0)},
    ),
    "llama3_8B": ModelArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336, **_LLAMA3),
    "llama3_70B": ModelArgs(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672, **_LLAMA3),
    "qwen3_0.6B": ModelArgs(dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, ffn_dim=3072, is_tied=True, **_QWEN3),
    "qwen3_8B": ModelArgs(dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, ffn_dim=12288, **_QWEN3),
}

"""Models of Hugging Face: their config.json as ModelArgs, the names of their weights, and back.

Shapes and the order of rows are the same on both sides, so weights are copied as they are.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torchtitan_wlb.config import Model
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.models.model_args import VOCAB_MULTIPLE, ModelArgs, RopeScaling, llama_configs

# Of a stretch of frequencies.
_SCALING = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "attention_factor": "attention_factor",
}
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor")
_YARN_KEYS = ("factor", "beta_fast", "beta_slow", "attention_factor")
FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
FAMILIES |= {"qwen3": "Qwen3ForCausalLM"}
_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def hf_name(name: str, is_tied: bool = False) -> str:
    """What Hugging Face calls a parameter of ours; a tied head is the embedding there."""
    layer, rest = m.groups() if (m := re.fullmatch(r"(layers\.\d+\.)(.*)", name)) else ("", name)
    module, _, kind = rest.rpartition(".")
    if module == "output" and is_tied:
        module = "tok_embeddings"
    return f"{'model.' if layer else ''}{layer}{_NAMES[module]}.{kind}"


@dataclass(frozen=True)
class _Wanted:
    """A key of config.json that must have one of some values (None: absent), or the model is another one."""

    key: str
    legal: tuple


# What we do not do, by family; "" for all.
_WANTED = {
    "": (
        _Wanted("hidden_act", ("silu", None)),
        _Wanted("mlp_bias", (False, None)),
        _Wanted("partial_rotary_factor", (1, 1.0, None)),
        _Wanted("quantization_config", (None,)),
    ),
    "llama": (_Wanted("attention_bias", (False, None)),),
    "mistral": (_Wanted("sliding_window", (None,)),),
    "qwen2": (_Wanted("use_sliding_window", (False, None)),),
    "qwen3": (_Wanted("use_sliding_window", (False, None)), _Wanted("attention_bias", (False, None))),
}


def read_hf_config(folder: str) -> ModelArgs:
    """The model of a folder with a config.json of Hugging Face.

    Raises:
        ConfigError: no such file, another family, or something in it that this decoder does not do; all by name.
    """
    flag = f"--model.flavor {folder}"
    try:
        c = json.loads((Path(folder) / "config.json").read_bytes())
        family = c.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{flag}: its config.json cannot be read ({str(error)[:200]})") from None
    if family not in FAMILIES:
        raise ConfigError(f"{flag}: model_type {family}; legal are {', '.join(FAMILIES)}")
    problems = [
        f"{flag}: {w.key} {c[w.key]}; legal is {w.legal[0]}"
        for w in (*_WANTED[""], *_WANTED[family])
        if c.get(w.key) not in w.legal
    ]
    try:
        # rope_parameters since transformers 5.
        rope = {**c, **(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
        args = ModelArgs(
            family=family,
            dim=c["hidden_size"],
            n_layers=c["num_hidden_layers"],
            n_heads=c["num_attention_heads"],
            n_kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
            ffn_dim=c["intermediate_size"],
            vocab_size=c["vocab_size"],
            head_dim=c.get("head_dim") or 0,
            is_tied=bool(c.get("tie_word_embeddings", False)),
            norm_eps=c.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            rope_scaling=_scaling(rope),
            trained_context=c.get("max_position_embeddings") or 0,
            has_qkv_bias=family == "qwen2",
            has_qk_norm=family == "qwen3",
        )
    except KeyError as error:
        problems.append(f"{flag}: its config.json has no {error.args[0]}")
    except (TypeError, ValueError) as error:
        problems.append(f"{flag}: {error}")
    if problems:
        raise ConfigError(*problems)
    return args


def write_hf_config(args: ModelArgs, context: int, dtype: str) -> dict[str, Any]:
    """The config.json of a model, as transformers of any version reads it.

    Args:
        context: tokens of the longest document. dtype: of the weights.
    """
    config = {
        "architectures": [FAMILIES[args.family]],
        "model_type": args.family,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "intermediate_size": args.ffn_dim,
        "vocab_size": args.n_ids,
        "tie_word_embeddings": args.is_tied,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": context,
        "torch_dtype": dtype,
        "attention_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if s := args.rope_scaling:
        named = {theirs: getattr(s, ours) for ours, theirs in _SCALING.items() if getattr(s, ours)}
        used = ("factor",) if s.kind == "linear" else _LLAMA3_KEYS if s.kind == "llama3" else _YARN_KEYS
        config["rope_scaling"] = {"rope_type": s.kind, "original_max_position_embeddings": s.original_context} | {
            k: v for k, v in named.items() if k in used
        }
    return config


def find_model(model: Model) -> ModelArgs:
    """The model of the [model] section, its vocabulary -1 where the tokenizer decides."""
    args = llama_configs[model.flavor] if model.flavor in llama_configs else read_hf_config(model.flavor)
    if model.rope_scaling != "model":
        args = replace(args, rope_scaling=None)
    if model.rope_scaling != "model" and model.rope_scaling != "none":
        scaling = RopeScaling(model.rope_scaling, model.rope_factor, model.rope_original_context)
        args = replace(args, rope_scaling=scaling)
    return replace(args, rope_theta=model.rope_theta or args.rope_theta)


def resolve_model(model: Model, tokenizer_ids: int) -> ModelArgs:
    """find_model with the vocabulary resolved: a pretrained model's, or the tokenizer's, in multiples of 128 rows.

    Raises:
        ConfigError: the tokenizer has more ids than the model.
    """
    args = find_model(model)
    n_ids = tokenizer_ids if args.vocab_size == -1 else args.vocab_size
    if tokenizer_ids > n_ids:
        raise ConfigError(
            f"--model.tokenizer {model.tokenizer} has {tokenizer_ids} ids, --model.flavor {model.flavor} has {n_ids}"
        )
    return replace(args, n_ids=n_ids, vocab_size=-(-n_ids // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)


def _scaling(rope: dict[str, Any]) -> RopeScaling | None:
    """The stretch of frequencies that a config asks for."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"rope_type {kind}; legal are default, linear, llama3, yarn")
    unknown = [k for k in ("mscale", "mscale_all_dim") if rope.get(k)]
    unknown += [k for k in ("truncate",) if rope.get(k) is False]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} of its rope scaling: not known here")
    given = {ours: float(rope[theirs]) for ours, theirs in _SCALING.items() if rope.get(theirs) is not None}
    original = rope.get("original_max_position_embeddings") or rope.get("max_position_embeddings") or 8192
    return RopeScaling(kind=cast(Any, kind), original_context=int(original), **given)

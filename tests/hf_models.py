"""Tiny models of the families that we know, as Hugging Face has them, with random weights."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 128, "max_position_embeddings": 256, "initializer_range": 0.1}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    # A vocabulary that is no multiple of 128 is padded here only.
    "llama": (transformers.LlamaConfig, {"vocab_size": 259, "rope_parameters": LLAMA3}),
    "mistral": (transformers.MistralConfig, {"vocab_size": 384, "sliding_window": None, "head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {"vocab_size": 259, "tie_word_embeddings": True}),
    "qwen3": (
        transformers.Qwen3Config,
        {"vocab_size": 384, "tie_word_embeddings": True, "head_dim": 32, "rope_parameters": YARN},
    ),
}


def make_model(family: str, folder, dtype: torch.dtype = torch.float32, **changed):
    """A model in a folder; norms and biases are no longer ones and zeros."""
    torch.manual_seed(0)
    config, more = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES | more | changed))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn_like(p))
    model.to(dtype).save_pretrained(folder, max_shard_size="100KB")
    return model

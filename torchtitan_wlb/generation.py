"""Sampling from a model with a cache of keys and values: prompts go through as one packed sequence, as in training;
then every step is a packed sequence of one token a prompt."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_wlb.models.attention import AttentionMeta
from torchtitan_wlb.models.llama import Transformer


class CachedAttention(nn.Module):
    """Stands in the place of a layer's `inner_attention`.

    Args:
        packed: the attention of a packed sequence, for the prompts.
        lengths: of the prompts. new: tokens that will follow each at most.
    """

    def __init__(self, packed: nn.Module, lengths: Sequence[int], new: int):
        super().__init__()
        self.packed, self.prompts = packed, list(lengths)
        self.room = max(lengths) + new
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None
        self.seen = torch.tensor(self.prompts)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """q [1, T, H, D], k, v [1, T, H_kv, D]: of all prompts, then of one token of each (T prompts)."""
        if self.k is None or self.v is None:
            self.k, self.v = (x.new_zeros(len(self.prompts), self.room, *x.shape[2:]) for x in (k, v))
            for cache, x in ((self.k, k), (self.v, v)):
                for row, prompt in zip(cache, x[0].split(self.prompts)):
                    row[: len(prompt)] = prompt
            self.seen = self.seen.to(q.device)
            return self.packed(q, k, v, meta)
        rows = torch.arange(len(self.prompts), device=q.device)
        self.k[rows, self.seen], self.v[rows, self.seen] = k[0], v[0]
        self.seen = self.seen + 1
        visible = torch.arange(self.room, device=q.device) < self.seen[:, None]
        out = F.scaled_dot_product_attention(
            q[0][:, :, None],  # [prompts, H, 1, D]
            self.k.transpose(1, 2),
            self.v.transpose(1, 2),
            attn_mask=visible[:, None, None],
            enable_gqa=True,
        )
        return out[None, :, :, 0]


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Sequence[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:
    """What the model says after each prompt.

    Args:
        model: whole, in one process; its max_position covers prompts and new tokens.
        prompts: ids, at least one each.
        stop: ids after which a prompt is done; they are not returned.
        temperature: 0 takes the likeliest token. top_p: share of the probability from which tokens are drawn.

    Returns:
        New ids of every prompt.
    """
    device = next(model.parameters()).device
    lengths = [len(p) for p in prompts]
    attentions: list = [layer.attention for layer in model.layers.values()]
    before = [a.inner_attention for a in attentions]
    for a in attentions:
        a.inner_attention = CachedAttention(a.inner_attention, lengths, max_new_tokens)
    generator = torch.Generator(device).manual_seed(seed)
    try:
        tokens = torch.tensor([i for p in prompts for i in p], device=device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        logits = _logits(model, tokens, positions, AttentionMeta.of(lengths, device))
        logits = logits[torch.tensor(lengths).cumsum(0) - 1]
        positions = torch.tensor(lengths, device=device)
        said: list[list[int]] = [[] for _ in prompts]
        done = [False] * len(prompts)
        one_each = AttentionMeta.of([1] * len(prompts), device)
        for step in range(max_new_tokens):
            tokens = _choose(logits, temperature, top_p, generator)
            for i, token in enumerate(tokens.tolist()):
                done[i] = done[i] or token in stop
                if not done[i]:
                    said[i].append(token)
            if all(done) or step == max_new_tokens - 1:
                break
            logits = _logits(model, tokens, positions, one_each)
            positions = positions + 1
        return said
    finally:
        for a, attention in zip(attentions, before):
            a.inner_attention = attention


def _logits(model: Transformer, tokens: torch.Tensor, positions: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
    """Logits in fp32 of a packed sequence of tokens [T]: [T, ids in use]."""
    assert model.tok_embeddings is not None and model.norm is not None and model.output is not None
    rope = cast(torch.Tensor, model.rope)[positions]
    h = model.tok_embeddings(tokens[None])
    for layer in model.layers.values():
        h = layer(h, rope=rope, meta=meta)
    return (model.norm(h)[0] @ model.output.weight.T)[:, : model.output.n_ids].float()


def _choose(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> torch.Tensor:
    """One id for every row of logits [n, ids]."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities, ids = (logits / temperature).softmax(-1).sort(-1, descending=True)
    unlikely = probabilities.cumsum(-1) - probabilities >= top_p  # what comes before is enough
    drawn = torch.multinomial(probabilities.masked_fill(unlikely, 0.0), 1, generator=generator)
    return ids.gather(-1, drawn)[:, 0]

"""The plain truth: every document alone, no packing, no parallelism, textbook operations in any precision."""

import math

import torch
import torch.nn.functional as F

from torchtitan_wlb.models.model_args import ModelArgs


def _rms_norm(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rotate(x, theta):
    """x [T, H, D]: features (i, i + D/2) turned by position x theta^(-2i/D)."""
    t, _, d = x.shape
    angle = torch.arange(t, dtype=torch.float64)[:, None] * theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
    z = torch.complex(*x.double().chunk(2, -1)) * turn[:, None]
    return torch.cat([z.real, z.imag], -1).to(x.dtype)


def hidden_states(w: dict[str, torch.Tensor], args: ModelArgs, tokens: torch.Tensor) -> torch.Tensor:
    """Normed hidden states [d, dim] of one document [d]."""
    h = w["tok_embeddings.weight"][tokens]
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for i in range(args.n_layers):
        p = f"layers.{i}."
        x = _rms_norm(h, w[p + "attention_norm.weight"], args.norm_eps)
        q, k, v = (
            (x @ w[p + f"attention.{n}.weight"].T).unflatten(-1, (-1, args.head_dim)) for n in ("wq", "wk", "wv")
        )
        q, k = _rotate(q, args.rope_theta), _rotate(k, args.rope_theta)
        group = args.n_heads // args.n_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(args.head_dim)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)
        h = h + attended.flatten(1) @ w[p + "attention.wo.weight"].T
        x = _rms_norm(h, w[p + "ffn_norm.weight"], args.norm_eps)
        gate = F.silu(x @ w[p + "feed_forward.w1.weight"].T)
        h = h + (gate * (x @ w[p + "feed_forward.w3.weight"].T)) @ w[p + "feed_forward.w2.weight"].T
    return _rms_norm(h, w["norm.weight"], args.norm_eps)


def loss_and_gradients(weights, args: ModelArgs, n_ids: int, documents, dtype):
    """(mean loss over valid labels, {name: gradient}) of documents [(tokens, labels)]; labels of -100 do not count."""
    w = {name: x.detach().to(dtype).requires_grad_() for name, x in weights.items()}
    n_valid = sum(int((labels != -100).sum()) for _, labels in documents)
    loss = torch.zeros((), dtype=dtype)
    for tokens, labels in documents:
        logits = hidden_states(w, args, tokens) @ w["output.weight"][:n_ids].T
        loss = loss + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / n_valid
    loss.backward()
    return loss.item(), {name: x.grad for name, x in w.items()}


def losses_by_bucket(weights, args: ModelArgs, n_ids: int, documents, edges, dtype) -> torch.Tensor:
    """[2, buckets of the length, buckets of the position]: summed losses and targets; a length of `edge` and a position
    of `edge - 1` are the last in a bucket."""
    w = {name: x.detach().to(dtype) for name, x in weights.items()}
    table = torch.zeros(2, len(edges) + 1, len(edges) + 1, dtype=dtype)
    for tokens, labels in documents:
        logits = hidden_states(w, args, tokens) @ w["output.weight"][:n_ids].T
        losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
        of_length = sum(len(tokens) > edge for edge in edges)
        for position, (loss, label) in enumerate(zip(losses, labels)):
            of_position = sum(position >= edge for edge in edges)
            table[0, of_length, of_position] += loss
            table[1, of_length, of_position] += int(label != -100)
    return table

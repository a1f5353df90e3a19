"""The decoder: Llama, and what differs from it by a bias (Qwen2), norms of q and k (Qwen3) or tied embeddings.

Letters: T tokens of a micro-batch, CP and TP the degrees, V vocabulary. A stage of a pipeline is a Transformer with
some layers left out. Between blocks activations are [1, T/CP, dim], with tensor (and sequence) parallelism
[1, T/CP/TP, dim]. Nothing here knows how it is made parallel: parallelisms/parallelize_llama.py replaces modules.
"""

import math
import zlib
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_wlb.loss import chunked_cross_entropy, token_losses
from torchtitan_wlb.models.attention import AttentionMeta, PackedAttention
from torchtitan_wlb.models.kernels import SDPA, Kernel
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.models.rotary import apply_rotary, rotary_table


class SelfAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, args: ModelArgs, kernel: Kernel):
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.q_dim, bias=args.has_qkv_bias)
        self.wk = nn.Linear(args.dim, args.kv_dim, bias=args.has_qkv_bias)
        self.wv = nn.Linear(args.dim, args.kv_dim, bias=args.has_qkv_bias)
        self.wo = nn.Linear(args.q_dim, args.dim, bias=False)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if args.has_qk_norm else None
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if args.has_qk_norm else None
        self.inner_attention: nn.Module = PackedAttention(kernel)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """x [1, T/CP, dim] -> [1, T/CP, dim] (over T/CP/TP tokens with tensor parallelism); heads inside are local
        (H/TP)."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = self.inner_attention(apply_rotary(q, rope), apply_rotary(k, rope), v, meta)
        return self.wo(out.flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs, kernel: Kernel = SDPA):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = SelfAttention(args, kernel)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope=rope, meta=meta)
        return x + self.feed_forward(self.ffn_norm(x))


class LossHead(nn.Module):
    """Output projection and cross-entropy in one module, so that FSDP and TP own the weight and logits stay chunked.

    Args:
        n_ids: ids in use; the rows above pad the vocabulary. chunk: tokens whose logits exist at once.
    """

    def __init__(self, dim: int, vocab_size: int, n_ids: int, chunk: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.n_ids, self.chunk = n_ids, chunk

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """x [1, T/CP, dim], labels [1, T/CP] -> loss summed over valid labels; in evaluation of every token, [T/CP]."""
        return self.loss(x, self.weight, labels)

    def loss(self, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, group=None) -> torch.Tensor:
        """weight [V/TP, dim]: this rank's rows; group: the tensor-parallel ranks, None for one."""
        cross_entropy = chunked_cross_entropy if self.training else token_losses
        return cross_entropy(x.squeeze(0), weight, labels[0], chunk=self.chunk, n_ids=self.n_ids, group=group)


class Transformer(nn.Module):
    """All or some layers of the model.

    Args:
        args: shape, with vocab_size resolved.
        n_ids: ids in use; the vocabulary above is padding.
        max_position: longest document.
        loss_chunk: tokens whose logits exist at once.
        layers: layers of this stage; first and last layer bring the embedding and the head.
        kernel: of the attention, see kernels.py.
    """

    def __init__(
        self,
        args: ModelArgs,
        *,
        n_ids: int,
        max_position: int,
        loss_chunk: int = 1024,
        layers: range | None = None,
        kernel: Kernel = SDPA,
    ):
        super().__init__()
        layers = range(args.n_layers) if layers is None else layers
        self.args, self.max_position = args, max_position
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim) if 0 in layers else None
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args, kernel) for i in layers})
        is_last = args.n_layers - 1 in layers
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps) if is_last else None
        self.output = LossHead(args.dim, args.vocab_size, n_ids, loss_chunk) if is_last else None
        self.register_buffer("rope", torch.empty(max_position, args.head_dim // 2, 2), persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        *,
        positions: torch.Tensor,
        meta: AttentionMeta,
        labels: torch.Tensor,
        loss_scale: float,
    ) -> torch.Tensor:
        """One micro-batch.

        Args:
            x: token ids int64 [1, T/CP] on the first stage, activations [1, T/CP/TP, dim] on the others.
            positions: [1, T/CP] position of every token in its document.
            labels: [1, T/CP], used on the last stage.
            loss_scale: factor of the summed loss (1 / valid labels of the step).

        Returns:
            Scaled loss on the last stage, a scalar, or in evaluation one of every token, [T/CP]; activations
            [1, T/CP/TP, dim] on the others.
        """
        rope = self.rope[positions[0]]
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            h = layer(h, rope=rope, meta=meta)
        if self.norm is None or self.output is None:
            return h
        return self.output(self.norm(h), labels) * loss_scale

    def tie(self) -> None:
        """Let the head be the embedding where the model wants it and this stage has both; after what replaces them."""
        if self.args.is_tied and self.output is not None and self.tok_embeddings is not None:
            self.output.weight = cast(nn.Parameter, self.tok_embeddings.weight)

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device) -> None:
        """Fill parameters and buffers after `to_empty`. Each parameter has a random stream of its own, named by (seed,
        its name), and every rank takes its part of the whole tensor, so the weights are the same in every layout."""
        self.rope.copy_(rotary_table(self.args, self.max_position, device))
        for name, p in self.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            if p.ndim == 1:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = 0.02
            if name.endswith(("wo.weight", "w2.weight")):
                std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))
            if self.args.is_tied and name == "output.weight":
                name = "tok_embeddings.weight"
            generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            full = torch.empty(p.shape, dtype=p.dtype, device=device).normal_(0.0, std, generator=generator)
            if isinstance(p, DTensor):
                full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
            p.copy_(full)

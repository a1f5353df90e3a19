"""Cross-entropy of a vocabulary-parallel head, in chunks; summed over targets to train, by token to evaluate.

The logits of a long micro-batch never exist at once: forward keeps one log-sum-exp per token, backward computes the
logits of a chunk again. With tensor parallelism every rank holds V/TP rows of the head; two small all-reduces a chunk
(maximum, sum and target logit) make the softmax global. No collective in backward: the gradient of the hidden states is
a partial sum that the caller reduces.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

IGNORE_INDEX = -100  # label of a token that is no target


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk, n_ids, group, first_id):
        ctx.chunk, ctx.n_ids, ctx.first_id = chunk, n_ids, first_id
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        lse = []
        for of_chunk, loss in _chunk_losses(hidden, weight, labels, chunk, n_ids, group, first_id):
            lse.append(of_chunk)
            total += loss.sum()
        ctx.save_for_backward(hidden, weight, labels, torch.cat(lse))
        return total

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, labels, lse = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=lse.dtype)  # sums over chunks, in at least fp32
        chunks = (x.split(ctx.chunk) for x in (hidden, labels, lse, d_hidden))
        for h, y, l, dh in zip(*chunks):
            d_logits = _logits(h, weight, ctx.n_ids, ctx.first_id).sub_(l[:, None]).exp_()
            local = (y - ctx.first_id).clamp(0, len(weight) - 1)
            mine = (y >= ctx.first_id) & (y < ctx.first_id + len(weight))
            d_logits.scatter_add_(1, local[:, None], -mine[:, None].to(d_logits.dtype))
            d_logits = d_logits.mul_(((y != IGNORE_INDEX) * grad)[:, None]).to(hidden.dtype)
            torch.mm(d_logits, weight, out=dh)
            d_weight += torch.mm(d_logits.T, h)
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None, None


def _chunk_losses(hidden, weight, labels, chunk, n_ids, group, first_id) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(log-sum-exp, loss or 0 where there is no target) of the tokens of every chunk, [chunk] each."""
    for h, y in zip(hidden.split(chunk), labels.split(chunk)):
        logits = _logits(h, weight, n_ids, first_id)
        top = logits.amax(-1)
        if group is not None:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        local = (y - first_id).clamp(0, len(weight) - 1)
        mine = (y >= first_id) & (y < first_id + len(weight))
        target = torch.where(mine, logits.gather(1, local[:, None])[:, 0], 0.0)
        sums = torch.stack([logits.sub_(top[:, None]).exp_().sum(-1), target])
        if group is not None:
            dist.all_reduce(sums, group=group)
        lse = top + sums[0].log()
        yield lse, torch.where(y != IGNORE_INDEX, lse - sums[1], 0.0)


def _logits(h: torch.Tensor, weight: torch.Tensor, n_ids: int, first_id: int) -> torch.Tensor:
    """[chunk, V/TP] in at least fp32; ids that only pad the vocabulary get -inf."""
    logits = torch.mm(h, weight.T).to(torch.promote_types(h.dtype, torch.float32))
    if first_id + len(weight) > n_ids:
        logits[:, max(0, n_ids - first_id) :] = float("-inf")
    return logits


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk: int,
    n_ids: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sum of -log softmax(hidden @ weight.T)[label] over labels that are not IGNORE_INDEX.

    Args:
        hidden: [T/CP, dim], equal on the tensor-parallel ranks.
        weight: [V/TP, dim] local rows of the head.
        labels: [T/CP].
        chunk: tokens whose logits exist at once.
        n_ids: ids in use; logits of the padding ids above are masked.
        group: tensor-parallel ranks, None for one.

    Returns:
        Scalar in fp32 (fp64 for fp64 input), equal on the tensor-parallel ranks. The gradient of hidden is this
        rank's partial sum.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk, n_ids, group, _first_id(weight, group))


@torch.no_grad()
def token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk: int,
    n_ids: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """What `chunked_cross_entropy` sums, token by token: [T/CP], 0 where there is no target. Without gradient."""
    losses = _chunk_losses(hidden, weight, labels, chunk, n_ids, group, _first_id(weight, group))
    return torch.cat([loss for _, loss in losses])


def _first_id(weight: torch.Tensor, group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) * len(weight) if group is not None else 0

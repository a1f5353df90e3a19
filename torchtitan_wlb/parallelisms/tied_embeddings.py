"""Tied embeddings in a pipeline: the first stage embeds with a matrix of which the last has a copy as its head.

Without pipelining they are one parameter. Here each copy gets the sum of both gradients, so that the copies stay equal;
`output.weight` is the copy that does not count in norms and is not saved.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

COPY = "output.weight"


def sum_tied_gradients(model_parts: Sequence[nn.Module], pp_group: dist.ProcessGroup, first: int, last: int) -> None:
    """After backward: add the gradients of embedding and head, shard by shard.

    Args:
        model_parts: this rank's stages.
        pp_group: pipeline ranks. first, last: those (in the group) that hold the first and the last stage.
    """
    copies = [part.tok_embeddings.weight for part in model_parts if part.tok_embeddings is not None]
    copies += [part.output.weight for part in model_parts if part.output is not None]
    mine = [_local(p.grad) for p in copies if p.grad is not None]
    if len(mine) == 2:
        mine[0].add_(mine[1])
        mine[1].copy_(mine[0])
    elif len(mine) == 1 and first != last:
        other = dist.get_global_rank(pp_group, last if dist.get_rank(pp_group) == first else first)
        received = torch.empty_like(mine[0])
        swap = [dist.P2POp(dist.isend, mine[0].contiguous(), other), dist.P2POp(dist.irecv, received, other)]
        for message in dist.batch_isend_irecv(swap):
            message.wait()
        mine[0].add_(received)


def _local(grad: Any) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad

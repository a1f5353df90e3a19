"""The norm of the whole gradient, over all ranks and stages."""

import math
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(
    parameters: dict[str, nn.Parameter], max_norm: float, device: torch.device, copies_of_others: Collection[str] = ()
) -> torch.Tensor:
    """Norm of the whole gradient over all ranks and stages, in fp64; gradients are scaled down to max_norm if it is
    larger (0: never). Not finite on one rank is not finite on all.

    Every rank adds the squares of its local shards, divided by the number of ranks that hold the same numbers; one
    all-reduce over all ranks gives the square of the norm.

    Args:
        copies_of_others: names of parameters that are scaled, but counted under another name.

    Raises:
        RuntimeError: a trainable parameter has no gradient, by name.
    """
    if missing := [name for name, p in parameters.items() if p.requires_grad and p.grad is None]:
        raise RuntimeError(f"no gradient after backward: {', '.join(missing)}")
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[torch.Tensor]] = {}
    uncounted: list[torch.Tensor] = []
    for name, p in parameters.items():
        if p.grad is None:
            continue
        grad = p.grad
        copies = 1
        if isinstance(grad, DTensor):
            copies = math.prod(n for n, x in zip(grad.device_mesh.shape, grad.placements) if x.is_replicate())
            grad = grad.to_local()
        (uncounted if name in copies_of_others else by_copies.setdefault(copies, [])).append(grad)
    for copies, grads in by_copies.items():
        norms = torch._foreach_norm([g for g in grads if g.numel()])
        if norms:
            total += torch.stack(norms).double().square().sum().to(device) / copies
    dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grads in filter(None, (*by_copies.values(), uncounted)):
            torch._foreach_mul_(grads, scale.to(grads[0].device, grads[0].dtype))
    return norm

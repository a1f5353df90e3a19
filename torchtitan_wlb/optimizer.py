"""AdamW or SGD over the parts of the model, and a learning rate that is a function of the step."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from torchtitan_wlb.config import LRScheduler, Optimizer


class OptimizersContainer:
    """One optimizer for every model part of this rank (several with an interleaved pipeline), stepped together."""

    def __init__(self, model_parts: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        self.model_parts, self.optimizers = model_parts, optimizers

    def step(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


def build_optimizers(model_parts: Sequence[nn.Module], config: Optimizer) -> OptimizersContainer:
    """Optimizers of the [optimizer] section; vectors (norms) are not decayed."""
    return OptimizersContainer(model_parts, [_build(part, config) for part in model_parts])


def _build(model: nn.Module, c: Optimizer) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": c.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    if c.name == "SGD":
        return torch.optim.SGD(groups, lr=c.lr, momentum=c.momentum)
    return torch.optim.AdamW(groups, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, fused=c.fused)


def lr_factor(step: int, steps: int, c: LRScheduler) -> float:
    """Learning rate of a step as a share of the peak: linear warm-up, constant, decay to min_lr_factor, which it keeps.

    Args:
        step: from 1 on. steps: of the run; the schedule has c.steps, or as many where that is 0.
    """
    steps = c.steps or steps
    if step <= c.warmup_steps:
        return step / c.warmup_steps
    decay_steps = max(1, round((steps - c.warmup_steps) * c.decay_ratio))
    into_decay = step - (steps - decay_steps)
    if into_decay <= 0:
        return 1.0
    progress = min(1.0, into_decay / decay_steps)
    shape = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "sqrt": 1 - math.sqrt(progress),
    }[c.decay_type]
    return c.min_lr_factor + (1 - c.min_lr_factor) * shape

"""AdamW or SGD over the parts of the model, and a learning rate that is a function of the step."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from torchtitan_wlb.config import LRScheduler, Optimizer


class Optimizers:
    """One optimizer for every model part of this rank (several with an interleaved pipeline), stepped together."""

    def __init__(self, models: Sequence[nn.Module], config: Optimizer):
        self.models = models
        self.parts = [_build(m, config) for m in models]

    def step(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)


def _build(model: nn.Module, c: Optimizer) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": c.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    if c.name == "SGD":
        return torch.optim.SGD(groups, lr=c.lr, momentum=c.momentum)
    return torch.optim.AdamW(groups, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, fused=True)


def lr_factor(step: int, total_steps: int, c: LRScheduler) -> float:
    """Learning rate of step 1 .. total_steps as a share of the peak: linear warm-up, constant, decay to
    min_lr_factor."""
    if step <= c.warmup_steps:
        return step / c.warmup_steps
    decay_steps = max(1, round((total_steps - c.warmup_steps) * c.decay_ratio))
    into_decay = step - (total_steps - decay_steps)
    if into_decay <= 0:
        return 1.0
    progress = min(1.0, into_decay / decay_steps)
    shape = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "sqrt": 1 - math.sqrt(progress),
    }[c.decay_type]
    return c.min_lr_factor + (1 - c.min_lr_factor) * shape

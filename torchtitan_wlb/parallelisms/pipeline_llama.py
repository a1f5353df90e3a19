"""Cut the model into stages of even predicted time and run micro-batches of different length through them.

Without pipelining the same `forward_backward` accumulates gradients over the micro-batches, with one reduction at the
end.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.cost.devices import Device
from torchtitan_wlb.cost.step_time import Action, StageCosts, StepModel, stages_of
from torchtitan_wlb.data.micro_batch import MicroBatch
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.parallelisms.schedules import count_stages, schedule_actions
from torchtitan_wlb.parallelisms.tied_embeddings import sum_tied_gradients
from torchtitan_wlb.parallelisms.varlen_stage import VarlenSchedule, VarlenStage
from torchtitan_wlb.profiling import MicroBatchClock


def split_layers(
    n_layers: int, n_stages: int, layer_cost: float, head_cost: float, embedding_cost: float = 0.0
) -> list[range]:
    """Deal layers to stages so that the slowest stage is as fast as possible (each gets at least one).

    Args:
        layer_cost, head_cost, embedding_cost: predicted seconds, same unit; the embedding counts for the first stage,
            the head for the last.
    """
    extra = [0.0] * n_stages
    extra[0] += embedding_cost
    extra[-1] += head_cost
    counts = [1] * n_stages
    for _ in range(n_layers - n_stages):
        # One more layer where the stage is then cheapest; ties go to later stages but the last, which keep fewer
        # activations alive.
        i = min(range(n_stages), key=lambda i: ((counts[i] + 1) * layer_cost + extra[i], -i))
        counts[i] += 1
    starts = [sum(counts[:i]) for i in range(n_stages + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


@dataclass(frozen=True)
class PipelinePlan:
    """How the model is cut and what each rank computes when.

    Attributes:
        stages: layers of every stage.
        actions: of every pipeline rank, see schedules.schedule_actions.
        step_model: their time model.
    """

    stages: list[range]
    actions: list[list[Action]]
    step_model: StepModel


def plan_pipeline(
    args: ModelArgs,
    *,
    schedule: str,
    pp: int,
    stages_per_rank: int,
    m: int,
    seq_len: int,
    cost: CostModel,
    device: Device,
    bytes_per_token: float,
    ranks: int,
    ac: str | int = "none",
) -> PipelinePlan:
    """Cut the model for a schedule; pp = 1 gives one stage.

    Args:
        m: micro-batches of a step.
        seq_len: of the documents for which stages take the same time.
        cost: of layers and head.
        device: for the transfers. bytes_per_token: of the activations between stages.
        ranks: of the job: whether stages lie in one machine.
        ac: activation checkpointing, see parallelize_llama.apply_ac.
    """
    n_stages = count_stages(schedule, pp, stages_per_rank)
    # Seconds a token.
    head = cost.token_cost * cost.head_share
    layer = (cost.token_cost - head) / args.n_layers
    attention = float(cost.attention(np.array([seq_len]))[0]) / seq_len / args.n_layers
    embedding = cost.token_cost * args.embedding_flops_per_token / args.flops_per_token
    stages = split_layers(args.n_layers, n_stages, layer + attention, head, embedding)
    linear = [len(r) * layer + (head if r.stop == args.n_layers else 0.0) for r in stages]
    recomputed = {"none": 0.0, "op": 0.0, "full": 1.0}[ac] if isinstance(ac, str) else 1 / ac
    costs = StageCosts(
        attention=tuple(len(r) / args.n_layers for r in stages),
        linear=tuple(x / sum(linear) for x in linear),
        recomputed=recomputed,
        transfer=(device.latency, bytes_per_token / device.reach(ranks)),
    )
    actions = schedule_actions(schedule, pp, m, stages_per_rank, split=ac == "none")
    return PipelinePlan(stages, actions, StepModel(actions, costs))


class Pipeline:
    """Forward and backward of all micro-batches of a step, with or without pipelining.

    Args:
        model_parts: this rank's parallelised stages in order (one, the whole model, without pipelining).
        actions: the schedule, see schedules.schedule_actions; not used without pipelining.
        world_mesh: the device mesh; its `pp` dimension is used.
        device, dtype, dim, tp: of the activations between stages.
        clock: told when the parts of micro-batches begin and end.
        gathers_once: without pipelining, gather all parameters before the first forward, keep them, and reduce
            gradients after the last backward, so that data-parallel ranks wait for each other at the ends of a step
            only. Needs a model that was built with reshard_after_forward=False.
        reduces_each: reduce gradients after every micro-batch, so that none are kept whole; replicas still add theirs
            at the end. Not with schedules that split backward.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        *,
        actions: list[list[Action]],
        world_mesh: DeviceMesh,
        device: torch.device,
        dtype: torch.dtype,
        dim: int,
        tp: int,
        clock: MicroBatchClock,
        gathers_once: bool = False,
        reduces_each: bool = False,
    ):
        self.model_parts, self._tp, self._clock = model_parts, tp, clock
        self._gathers_once, self._reduces_each = gathers_once, reduces_each
        self._schedule = None
        self._tied: Callable[[], None] = lambda: None
        if world_mesh["pp"].size() > 1:
            group, mine = world_mesh["pp"].get_group(), stages_of(actions[world_mesh["pp"].get_local_rank()])
            n_stages = sum(len(stages_of(each)) for each in actions)
            stages = [
                VarlenStage(m, i, n_stages, device, dtype, dim, group, clock, reduces_each)
                for m, i in zip(model_parts, mine)
            ]
            self._schedule = VarlenSchedule(stages, actions)
            if model_parts[0].args.is_tied:
                first, last = (next(r for r, a in enumerate(actions) if s in stages_of(a)) for s in (0, n_stages - 1))
                self._tied = partial(sum_tied_gradients, model_parts, group, first, last)

    def forward_backward(self, micro_batches: list[MicroBatch], loss_scale: float) -> torch.Tensor:
        """Gradients of the step, accumulated into the parameters.

        Args:
            micro_batches: the M micro-batches of this data-parallel rank, on the device.
            loss_scale: 1 / valid labels of the whole step.

        Returns:
            This rank's share of the step's mean loss, detached (0 on ranks without the last stage; equal on
            tensor-parallel ranks).
        """
        self._clock.begin_step([f"{len(mb.lengths)} documents, {mb.n_tokens} tokens" for mb in micro_batches])
        if self._schedule is None:
            return self._accumulate(micro_batches, loss_scale)
        losses = self._run(micro_batches, loss_scale, backward=True)
        self._tied()
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=micro_batches[0].tokens.device)

    def _run(self, micro_batches: list[MicroBatch], loss_scale: float, backward: bool) -> list[torch.Tensor]:
        assert self._schedule is not None
        return self._schedule.run(
            [mb.tokens for mb in micro_batches],
            [mb.labels for mb in micro_batches],
            [_kwargs(mb, loss_scale) for mb in micro_batches],
            [mb.tokens.shape[1] // self._tp for mb in micro_batches],
            backward,
        )

    def _accumulate(self, micro_batches: list[MicroBatch], loss_scale: float) -> torch.Tensor:
        (model,) = self.model_parts
        total = torch.zeros((), device=micro_batches[0].tokens.device)
        if self._gathers_once:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard(async_op=True)
        at_end = self._gathers_once and not self._reduces_each and len(micro_batches) > 1
        for i, mb in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            model.set_requires_gradient_sync(self._reduces_each or (is_last and not at_end))
            model.set_requires_all_reduce(is_last)
            model.set_is_last_backward(is_last and not at_end)
            model.set_reshard_after_backward((is_last and not at_end) or not self._gathers_once)
            with self._clock.part("forward", i):
                loss = model(mb.tokens, **_kwargs(mb, loss_scale))
            with self._clock.part("backward", i):
                loss.backward()
            total += loss.detach()
        if at_end:
            # As the schedules do it: FSDP's own reduction in the last backward would wait layer by layer.
            PipelineStage.perform_reduce_grad(cast(Any, SimpleNamespace(submod=model)), grad_scale_factor=1)
        return total

    @torch.no_grad()
    def evaluate(self, micro_batches: list[MicroBatch]) -> list[torch.Tensor]:
        """The loss of every token, [T/CP] for each micro-batch, 0 where there is no target; forward only.

        Returns:
            In the order of the micro-batches, equal on tensor-parallel ranks; [] on ranks without the last stage.
        """
        self._clock.begin_step(["validation"] * len(micro_batches))
        with _evaluation(self.model_parts):
            if self._schedule is not None:
                return self._run(micro_batches, 1.0, backward=False)
            return [self.model_parts[0](mb.tokens, **_kwargs(mb, 1.0)) for mb in micro_batches]


@contextlib.contextmanager
def _evaluation(model_parts: Sequence[nn.Module]):
    for m in model_parts:
        m.eval()
    try:
        yield
    finally:
        for m in model_parts:
            m.train()


def _kwargs(mb: MicroBatch, loss_scale: float) -> dict:
    """What every stage gets beside the activations."""
    return {"positions": mb.positions, "meta": mb.attention, "labels": mb.labels, "loss_scale": loss_scale}

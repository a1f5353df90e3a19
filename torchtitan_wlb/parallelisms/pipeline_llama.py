"""Cut the model into stages of even predicted time and run micro-batches of different length through them.

Without pipelining the same `forward_backward` accumulates gradients over the micro-batches, with one reduction at the
last.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_wlb.data.micro_batch import MicroBatch
from torchtitan_wlb.models.llama import ModelArgs
from torchtitan_wlb.packing.cost_model import Device
from torchtitan_wlb.parallelisms.parallel_dims import V_SCHEDULES, count_stages
from torchtitan_wlb.parallelisms.varlen_stage import VarlenSchedule, VarlenStage, schedule_actions
from torchtitan_wlb.profiling import MicroBatchClock
from torchtitan_wlb.simulation.step_time import Action, StageCosts, StepModel


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
        actions: of every pipeline rank, see varlen_stage.schedule_actions.
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
    device: Device,
    bytes_per_token: float,
    recomputed: float = 0.0,
) -> PipelinePlan:
    """Cut the model for a schedule; pp = 1 gives one stage.

    Args:
        m: micro-batches of a step.
        seq_len: context window; attention of half of it counts in the cost of a layer.
        device: for the transfers. bytes_per_token: of the activations between stages.
        recomputed: share of the blocks under activation checkpointing.
    """
    n_stages = count_stages(schedule, pp, stages_per_rank)
    layer, head = args.layer_flops_per_token, args.head_flops_per_token(args.vocab_size)
    whole_layer = layer + args.layer_flops_per_pair * seq_len / 2
    stages = split_layers(args.n_layers, n_stages, whole_layer, head, args.embedding_cost())
    linear = [len(r) * layer + (head if r.stop == args.n_layers else 0.0) for r in stages]
    costs = StageCosts(
        attention=tuple(len(r) / args.n_layers for r in stages),
        linear=tuple(x / sum(linear) for x in linear),
        recomputed=recomputed,
        transfer=(device.latency, bytes_per_token / device.link),
    )
    actions = schedule_actions(schedule, pp, m, stages_per_rank)
    return PipelinePlan(stages, actions, StepModel(actions, costs))


def my_stages(pp_rank: int, pp: int, schedule: str, stages_per_rank: int) -> tuple[int, list[int]]:
    """(number of stages, indices of those on a pipeline rank); see LOOPED_SCHEDULES and V_SCHEDULES."""
    n_stages = count_stages(schedule, pp, stages_per_rank)
    if schedule in V_SCHEDULES and n_stages > 1:
        return n_stages, [pp_rank, n_stages - 1 - pp_rank]
    return n_stages, list(range(pp_rank, n_stages, pp))


class Pipeline:
    """Forward and backward of all micro-batches of a step, with or without pipelining.

    Args:
        models: this rank's parallelised stages (one, the whole model, without pipelining).
        stage_indices, n_stages: which stages they are.
        actions: the schedule, see varlen_stage.schedule_actions; not used without pipelining.
        n_micro_batches: M of every step.
        mesh: the device mesh; its `pp` dimension is used.
        device, dtype, dim, tp: of the activations between stages.
        clock: told when the parts of micro-batches begin and end.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        stage_indices: list[int],
        n_stages: int,
        actions: list[list[Action]],
        n_micro_batches: int,
        mesh: DeviceMesh,
        device: torch.device,
        dtype: torch.dtype,
        dim: int,
        tp: int,
        clock: MicroBatchClock,
    ):
        self.models, self._tp, self._clock = models, tp, clock
        self._schedule = None
        if mesh["pp"].size() > 1:
            group = mesh["pp"].get_group()
            stages = [
                VarlenStage(m, i, n_stages, device, dtype, dim, group, clock) for m, i in zip(models, stage_indices)
            ]
            self._schedule = VarlenSchedule(stages, actions, n_micro_batches)

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
        return self._run(micro_batches, loss_scale, backward=True)

    def _run(self, micro_batches: list[MicroBatch], loss_scale: float, backward: bool) -> torch.Tensor:
        assert self._schedule is not None
        losses = self._schedule.run(
            [mb.tokens for mb in micro_batches],
            [mb.labels for mb in micro_batches],
            [_kwargs(mb, loss_scale) for mb in micro_batches],
            [mb.tokens.shape[1] // self._tp for mb in micro_batches],
            backward,
        )
        device = micro_batches[0].tokens.device
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=device)

    def _accumulate(self, micro_batches: list[MicroBatch], loss_scale: float) -> torch.Tensor:
        (model,) = self.models
        total = torch.zeros((), device=micro_batches[0].tokens.device)
        for i, mb in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            with self._clock.part("forward", i):
                loss = model(mb.tokens, **_kwargs(mb, loss_scale))
            with self._clock.part("backward", i):
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, micro_batches: list[MicroBatch], loss_scale: float) -> torch.Tensor:
        """This rank's share of the mean loss, forward only."""
        self._clock.begin_step(["validation"] * len(micro_batches))
        with _evaluation(self.models):
            if self._schedule is None:
                return torch.stack([self.models[0](mb.tokens, **_kwargs(mb, loss_scale)) for mb in micro_batches]).sum()
            return self._run(micro_batches, loss_scale, backward=False)


@contextlib.contextmanager
def _evaluation(models: Sequence[nn.Module]):
    for m in models:
        m.eval()
    try:
        yield
    finally:
        for m in models:
            m.train()


def _kwargs(mb: MicroBatch, loss_scale: float) -> dict:
    """What every stage gets beside the activations."""
    return {"positions": mb.positions, "meta": mb.attention, "labels": mb.labels, "loss_scale": loss_scale}

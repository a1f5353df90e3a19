"""Pipeline schedules for micro-batches of different length.

torch.distributed.pipelining infers one shape from the first micro-batch and allocates receive buffers of that shape for
all. Here the length of every micro-batch is known from the plan on every rank, so nothing is inferred or exchanged:
before a step `VarlenStage.set_lengths` describes the buffers, and each is allocated when its transfer starts and
dropped after its backward.

Every schedule is a list of actions for every rank (`schedule_actions`), executed by one runtime that posts receives
early and never waits for a send: a rank is late only when its input is. The same lists feed the time model
(simulation/step_time.py).

Private API, torch 2.13, all of it in this file: `_prepare_forward_infra`, `_prepare_backward_infra` and
`_post_metadata_inference_cleanup` (called by the schedule at its first step), `_RecvInfo`, `_StageMeta`,
`_get_recv_ops`; `_PipelineScheduleRuntime`, `_prepare_schedule_with_comms`, `_Action`, `_step_microbatches` (the public
`step` splits one batch into equal micro-batches), `_has_backward` (the public `eval` goes through `step`).
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import extract_tensor_meta, extract_tensor_metas
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import _RecvInfo

from torchtitan_wlb.parallelisms.parallel_dims import count_stages
from torchtitan_wlb.profiling import MicroBatchClock
from torchtitan_wlb.simulation.step_time import Action


class VarlenStage(PipelineStage):
    """One stage.

    Args:
        submodule: the stage's layers.
        stage_index, n_stages: which of how many.
        device, dtype, dim: of the activations [1, T/CP/TP, dim] between stages.
        group: pipeline ranks.
        clock: told when the parts of micro-batches begin and end.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        n_stages: int,
        device: torch.device,
        dtype: torch.dtype,
        dim: int,
        group: dist.ProcessGroup,
        clock: MicroBatchClock,
    ):
        # Static metadata at construction: shapes do not matter, set_lengths gives the real ones.
        hidden = torch.empty(1, 1, dim, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(1, 1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        inputs = tokens if stage_index == 0 else hidden
        outputs = loss if stage_index == n_stages - 1 else hidden
        super().__init__(submodule, stage_index, n_stages, device, input_args=inputs, output_args=outputs, group=group)
        self._dtype, self._dim, self._clock = dtype, dim, clock
        self._static = (extract_tensor_metas((inputs,)), extract_tensor_metas((outputs,)))

    def set_lengths(self, lengths: list[int]) -> None:
        """Describe the micro-batches of the next step: tokens T/CP/TP of each, in training order."""
        self.chunks = len(lengths)
        self._stage_meta.inputs, self._stage_meta.outputs = self._static
        self.act_send_info = {0: [] if self.is_last else [self.stage_index + 1]}
        self.args_recv_info = {i: self._infos(t, self.stage_index - 1, self.is_first) for i, t in enumerate(lengths)}
        self.grad_recv_info = {i: self._infos(t, self.stage_index + 1, self.is_last) for i, t in enumerate(lengths)}
        self.grad_send_info = None
        gradient = (
            None
            if self.is_first
            else extract_tensor_metas((torch.empty(1, 1, self._dim, dtype=self._dtype, device="meta"),))
        )
        self._stage_meta.input_grads = gradient

    def _infos(self, tokens: int, source: int, is_end: bool) -> tuple[_RecvInfo, ...]:
        if is_end:
            return (_RecvInfo("root", None, None, None, is_root_arg=True),)
        shape = torch.empty(1, tokens, self._dim, dtype=self._dtype, device="meta", requires_grad=True)
        return (_RecvInfo(f"stage_{source}", source, None, extract_tensor_meta(shape)),)

    def _get_recv_ops(self, recv_infos) -> list[dist.P2POp]:
        for info in recv_infos:
            if not info.is_root_arg:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=self._dtype, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        with self._clock.part("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        with self._clock.part("backward of the weights", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        with self._clock.part("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in infos[bwd_chunk_id]:
                info.buffer = None

    # What the schedule calls at its first step: everything is known already.

    def _prepare_forward_infra(self, *args, **kwargs):
        return None

    def _prepare_backward_infra(self, *args, **kwargs):
        return None

    def _post_metadata_inference_cleanup(self) -> None:
        return None


_KINDS = {
    _ComputationType.FORWARD: "F",
    _ComputationType.FULL_BACKWARD: "B",
    _ComputationType.BACKWARD_INPUT: "I",
    _ComputationType.BACKWARD_WEIGHT: "W",
}
_TYPES = {kind: type for type, kind in _KINDS.items()}
_FORWARD_HALF = (
    _ComputationType.UNSHARD,
    _ComputationType.RESHARD,
    _ComputationType.RECV_F,
    _ComputationType.FORWARD,
    _ComputationType.SEND_F,
)


def schedule_actions(
    schedule: str, pp: int, m: int, stages_per_rank: int = 2, split: bool = True
) -> list[list[Action]]:
    """What every pipeline rank computes in which order: (kind, stage, micro-batch), see simulation/step_time.py.

    Args:
        schedule: name of a torch.distributed.pipelining schedule.
        pp, m: pipeline ranks and micro-batches, legal for the schedule (parallel_dims.schedule_problem).
        stages_per_rank: of the looped schedules.
        split: let the schedule split backward into I and W. Not with activation checkpointing: torch runs W as a
            backward of its own for every weight, each of which would run the forward of the block again (a step took
            2.3 times as long). Then a whole backward stands in the place of I.
    """
    if schedule in ("GPipe", "1F1B") or pp == 1:
        return [_one_stage_actions(schedule, pp, rank, m) for rank in range(pp)]
    # A schedule writes down the lists of all ranks from the number of stages alone: no process group is needed.
    n_stages = count_stages(schedule, pp, stages_per_rank)
    stages = [
        SimpleNamespace(stage_index=i, num_stages=n_stages, group_size=pp, group_rank=0, submod=None)
        for i in range(n_stages // pp)
    ]
    order = get_schedule_class(schedule)(stages, n_microbatches=m, loss_fn=identity).pipeline_order
    actions = [list(_flatten(order[rank])) for rank in range(pp)]
    if split:
        return actions
    return [[("B" if kind == "I" else kind, s, i) for kind, s, i in each if kind != "W"] for each in actions]


def _one_stage_actions(schedule: str, pp: int, rank: int, m: int) -> list[Action]:
    """GPipe: all forwards first. 1F1B: as many as there are ranks from here on, then one backward for one forward."""
    ahead = m if schedule == "GPipe" and pp > 1 else min(m, pp - rank)
    actions: list[Action] = [("F", rank, i) for i in range(ahead)]
    for i in range(m):
        actions.append(("B", rank, i))
        if ahead + i < m:
            actions.append(("F", rank, ahead + i))
    return actions


def _flatten(actions: list[_Action | None]) -> Iterator[Action]:
    for a in actions:
        if a is not None:
            # DualPipeV names pairs of forward and backward that a GPU may overlap; one after the other here.
            for part in a.sub_actions or (a,):
                yield _KINDS[part.computation_type], part.stage_index, cast(int, part.microbatch_index)


def identity(loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Loss function of a schedule: the last stage returns the scaled loss itself."""
    return loss


class VarlenSchedule(_PipelineScheduleRuntime):
    """Runs a list of actions for every rank over VarlenStages.

    Args:
        stages: of this rank.
        actions: of all ranks.
    """

    def __init__(self, stages: list[VarlenStage], actions: list[list[Action]]):
        n_micro_batches = 1 + max(i for _, _, i in actions[0])
        # Gradients are sums already: the loss is divided by the valid labels of the whole step.
        super().__init__(stages, n_micro_batches, loss_fn=identity, scale_grads=False)
        self._prepare_schedule_with_comms(
            {rank: [_Action(s, _TYPES[kind], i) for kind, s, i in each] for rank, each in enumerate(actions)}
        )
        self._training = self.pipeline_order_with_comms
        self._evaluation = {
            rank: [a for a in each if a.computation_type in _FORWARD_HALF] for rank, each in self._training.items()
        }

    def run(
        self,
        tokens: list[torch.Tensor],
        labels: list[torch.Tensor],
        kwargs: list[dict],
        lengths: list[int],
        backward: bool,
    ) -> list[torch.Tensor]:
        """One step, or the forward half of one.

        Args:
            tokens, labels: [1, T/CP] of every micro-batch. kwargs: what every stage gets beside the activations.
            lengths: T/CP/TP of every micro-batch.

        Returns:
            The losses of the micro-batches on the rank of the last stage, [] elsewhere.
        """
        self._has_backward = backward
        self.pipeline_order_with_comms = self._training if backward else self._evaluation
        for stage in self._stages:
            stage.has_backward = backward
            stage.clear_runtime_states()
            stage.set_lengths(lengths)
        losses: list[torch.Tensor] = []
        has_loss = any(stage.is_last for stage in self._stages)
        arguments = [(t,) for t in tokens]
        self._step_microbatches(arguments, kwargs, labels, losses if has_loss else None, return_outputs=False)
        return losses

"""Pipeline schedules for micro-batches of different length.

torch.distributed.pipelining infers one shape from the first micro-batch and allocates receive buffers of that shape for
all. Here the length of every micro-batch is known from the plan on every rank, so nothing is inferred or exchanged:
before a step `VarlenStage.set_lengths` describes the buffers, and each is allocated when its transfer starts and
dropped after its backward.

Every schedule is a list of actions for every rank (schedules.py), executed by one runtime that posts receives early and
never waits for a send: a rank is late only when its input is.

The methods and attributes with an underscore that are overridden or set here are listed in torch_private.py.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from torchtitan_wlb.cost.step_time import Action
from torchtitan_wlb.parallelisms.schedules import ACTION_TYPES, identity
from torchtitan_wlb.profiling import MicroBatchClock
from torchtitan_wlb.torch_private import (
    Action as PipelineAction,
)
from torchtitan_wlb.torch_private import (
    PipelineScheduleRuntime,
    RecvInfo,
    add_send_recv,
    add_unshard_reshard,
    extract_tensor_meta,
    extract_tensor_metas,
)


class VarlenStage(PipelineStage):
    """One stage.

    Args:
        submodule: the stage's layers.
        stage_index, n_stages: which of how many.
        device, dtype, dim: of the activations [1, T/CP/TP, dim] between stages.
        group: pipeline ranks.
        clock: told when the parts of micro-batches begin and end.
        reduces_each: reduce gradients after every micro-batch.
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
        reduces_each: bool = False,
    ):
        # Static metadata at construction: shapes do not matter, set_lengths gives the real ones.
        hidden = torch.empty(1, 1, dim, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(1, 1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        inputs = tokens if stage_index == 0 else hidden
        outputs = loss if stage_index == n_stages - 1 else hidden
        super().__init__(submodule, stage_index, n_stages, device, input_args=inputs, output_args=outputs, group=group)
        self._dtype, self._dim, self._clock, self._reduces_each = dtype, dim, clock, reduces_each
        self._static = (extract_tensor_metas((inputs,)), extract_tensor_metas((outputs,)))

    def set_lengths(self, lengths: list[int]) -> None:
        """Describe the micro-batches of the next step: tokens T/CP/TP of each, in training order."""
        self.chunks, self._done = len(lengths), 0
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

    def _infos(self, tokens: int, source: int, is_end: bool) -> tuple:
        if is_end:
            return (RecvInfo("root", None, None, None, is_root_arg=True),)
        shape = torch.empty(1, tokens, self._dim, dtype=self._dtype, device="meta", requires_grad=True)
        return (RecvInfo(f"stage_{source}", source, None, extract_tensor_meta(shape)),)

    def _get_recv_ops(self, recv_infos, *group) -> list[dist.P2POp]:
        for info in recv_infos:
            if not info.is_root_arg:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=self._dtype, device=self.device)
        return super()._get_recv_ops(recv_infos, *group)  # 2.14 names the group of the direction

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        with self._clock.part("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        with self._clock.part("backward of the weights", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        with self._clock.part("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            if self._reduces_each:
                self._done += 1
                self.submod.set_requires_all_reduce(self._done == self.chunks)  # type: ignore[operator]
                self.perform_reduce_grad(1)
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


class VarlenSchedule(PipelineScheduleRuntime):
    """Runs a list of actions for every rank over VarlenStages.

    Args:
        stages: of this rank.
        actions: of all ranks.
    """

    def __init__(self, stages: list[VarlenStage], actions: list[list[Action]]):
        n_micro_batches = 1 + max(i for _, _, i in actions[0])
        # Gradients are sums already: the loss is divided by the valid labels of the whole step.
        super().__init__(stages, n_micro_batches, loss_fn=identity, scale_grads=False)
        lists = [[PipelineAction(s, ACTION_TYPES[kind], i) for kind, s, i in each] for each in actions]
        self._prepare_schedule_with_comms(dict(enumerate(lists)))
        self._training: dict[int, list] = self.pipeline_order_with_comms  # type: ignore[has-type]
        # Forward alone has other gathers and frees of FSDP than the forward half of a step.
        forward = [[a for a in each if a.computation_type == ACTION_TYPES["F"]] for each in lists]
        self._evaluation: dict[int, list] = add_send_recv(
            {rank: add_unshard_reshard(each) for rank, each in enumerate(forward)},
            stage_to_rank=lambda stage: self.stage_index_to_group_rank[stage],
            num_stages=self._num_stages,
        )

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
            What the last stage returned for every micro-batch, in order, on its rank; [] elsewhere.
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

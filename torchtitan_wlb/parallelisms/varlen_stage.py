"""A pipeline stage for micro-batches of different length.

torch.distributed.pipelining infers one shape from the first micro-batch and allocates receive buffers of that shape for
all. Here the length of every micro-batch is known from the plan on every rank, so nothing is inferred or exchanged:
before a step `set_lengths` describes the buffers, and each is allocated when its transfer starts and dropped after its
backward.

Private API, torch 2.13: `_prepare_forward_infra`, `_prepare_backward_infra` and `_post_metadata_inference_cleanup`
(called by the schedule once, and again after a switch between training and evaluation), `_RecvInfo`, `_StageMeta`,
`_get_recv_ops`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import extract_tensor_meta, extract_tensor_metas
from torch.distributed.pipelining.stage import _RecvInfo


class VarlenStage(PipelineStage):
    """One stage.

    Args:
        submodule: the stage's layers.
        stage_index, n_stages: which of how many.
        device, dtype, dim: of the activations [1, T/CP/TP, dim] between stages.
        group: pipeline ranks.
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
    ):
        # Static metadata at construction: shapes do not matter, set_lengths gives the real ones.
        hidden = torch.empty(1, 1, dim, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(1, 1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        inputs = tokens if stage_index == 0 else hidden
        outputs = loss if stage_index == n_stages - 1 else hidden
        super().__init__(submodule, stage_index, n_stages, device, input_args=inputs, output_args=outputs, group=group)
        self._dtype, self._dim = dtype, dim
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

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
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

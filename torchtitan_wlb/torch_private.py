"""Every private name of torch that this project uses, and why.

`from torchtitan_wlb.torch_private import X` looks X up when it is imported, so a part of the project fails on another
torch only if it needs the name that is gone. tests/unit_tests/test_torch_private.py holds the parameters that each had
where it was run, for the versions that pyproject.toml declares.
"""

import importlib
from typing import Any

_SCHEDULES, _STAGE = "torch.distributed.pipelining.schedules", "torch.distributed.pipelining.stage"
_UTILS, _MESH = "torch.distributed.pipelining._utils", "torch.distributed.device_mesh"
_BALANCER = "torch.distributed.tensor.experimental._context_parallel._load_balancer"

PRIVATE = {
    # Runs any list of actions; the public schedules run their own, on micro-batches of one length. Its public step
    # takes lists of micro-batches since 2.14 only.
    "PipelineScheduleRuntime": f"{_SCHEDULES}:_PipelineScheduleRuntime",
    "prepare_schedule": f"{_SCHEDULES}:_PipelineScheduleRuntime._prepare_schedule_with_comms",
    "step_microbatches": f"{_SCHEDULES}:_PipelineScheduleRuntime._step_microbatches",
    "add_unshard_reshard": f"{_SCHEDULES}:_add_unshard_reshard",
    "add_send_recv": f"{_SCHEDULES}:_add_send_recv",
    "Action": f"{_SCHEDULES}:_Action",
    "ComputationType": f"{_SCHEDULES}:_ComputationType",
    # A receive buffer of its own length for every micro-batch, allocated when it is needed.
    "RecvInfo": f"{_STAGE}:_RecvInfo",
    "get_recv_ops": f"{_STAGE}:PipelineStage._get_recv_ops",
    "extract_tensor_meta": f"{_UTILS}:extract_tensor_meta",
    "extract_tensor_metas": f"{_UTILS}:extract_tensor_metas",
    # Called by a schedule at its first step to find out shapes; they are known from the plan here.
    "prepare_forward": f"{_STAGE}:PipelineStage._prepare_forward_infra",
    "prepare_backward": f"{_STAGE}:PipelineStage._prepare_backward_infra",
    "metadata_cleanup": f"{_STAGE}:PipelineStage._post_metadata_inference_cleanup",
    # One dimension of a mesh out of two; taking it by name warns since 2.11.
    "flatten_mesh": f"{_MESH}:DeviceMesh._flatten",
    "concatenate_meshes": f"{_MESH}:DeviceMesh._concatenate",
    # Public since 2.14 only.
    "set_timeout": "torch.distributed.distributed_c10d:_set_pg_timeout",
    # Activation checkpointing as a module, as torchtitan has it.
    "checkpoint_wrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper",
    # donated_buffer: compiled graphs whose backward runs twice.
    "functorch_config": "torch._functorch.config:",
    # An operator takes a process group by its name.
    "resolve_group": "torch.distributed.distributed_c10d:_resolve_process_group",
    # Tensor parallelism's collectives in pieces under matrix products.
    "inductor_config": "torch._inductor.config:",
    "enable_symmetric_memory": "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
    # The seam at which torch's own context parallelism takes another order of tokens.
    "LoadBalancer": f"{_BALANCER}:_LoadBalancer",
    "generate_indices": f"{_BALANCER}:_LoadBalancer._generate_indices",
    # Collectives that torch.compile sees as operators of one output.
    "all_gather": "torch:ops._c10d_functional.all_gather_into_tensor",
    "reduce_scatter": "torch:ops._c10d_functional.reduce_scatter_tensor",
    "wait_tensor": "torch:ops._c10d_functional.wait_tensor",
    # Return the log-sum-exp and take it back; scaled_dot_product_attention keeps it to itself.
    "cpu_flash": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "cpu_flash_backward": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "cuda_flash": "torch:ops.aten._flash_attention_forward",
    "cuda_flash_backward": "torch:ops.aten._flash_attention_backward",
}


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(name)
    module, _, attributes = PRIVATE[name].partition(":")
    found = importlib.import_module(module)
    for attribute in filter(None, attributes.split(".")):
        found = getattr(found, attribute)
    return found

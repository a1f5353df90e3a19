"""Every private name of torch that this project uses, with the parameters it had where it was run.

`from torchtitan_wlb.torch_private import X` looks X up when it is imported, so a part of the project fails on another
torch only if it needs the name that is gone. A unit test compares PRIVATE with the installed torch.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

RUN_WITH = ("2.13", "2.14")  # the range that pyproject.toml declares


@dataclass(frozen=True)
class Private:
    """A private name.

    Attributes:
        path: "module:attribute".
        why: what there is no public way to.
        parameters: names of its parameters, one string a form that was run; () where it is not called.
    """

    path: str
    why: str
    parameters: tuple[str, ...] = ()

    def find(self) -> Any:
        """The object; AttributeError or ImportError where torch has it no more."""
        module, _, attribute = self.path.partition(":")
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found


_SCHEDULES, _STAGE = "torch.distributed.pipelining.schedules", "torch.distributed.pipelining.stage"
_RUNTIME = "runs any list of actions; the public schedules run their own, on micro-batches of one length"
_STATIC = "called by a schedule at its first step, to find out shapes that are known from the plan here"
_MESH = "torch.distributed.device_mesh"
_DIMENSION = "one dimension of a mesh out of two; taking it by name warns since 2.11"
_KERNEL = "returns the log-sum-exp and takes it back; scaled_dot_product_attention keeps it to itself"
_BALANCER = "torch.distributed.tensor.experimental._context_parallel._load_balancer"
_ORDER = "the seam at which torch's own context parallelism takes another order of tokens"
_COLLECTIVE = "collectives that torch.compile sees as operators of one output"

PRIVATE = {
    "PipelineScheduleRuntime": Private(f"{_SCHEDULES}:_PipelineScheduleRuntime", _RUNTIME),
    "prepare_schedule": Private(
        f"{_SCHEDULES}:_PipelineScheduleRuntime._prepare_schedule_with_comms", _RUNTIME, ("self actions format",)
    ),
    "step_microbatches": Private(
        f"{_SCHEDULES}:_PipelineScheduleRuntime._step_microbatches",
        "step takes lists of micro-batches since 2.14 only",
        ("self arg_mbs kwarg_mbs target_mbs losses return_outputs loss_kwargs",),
    ),
    "Action": Private(
        f"{_SCHEDULES}:_Action", _RUNTIME, ("stage_index computation_type microbatch_index sub_actions",)
    ),
    "ComputationType": Private(f"{_SCHEDULES}:_ComputationType", _RUNTIME),
    "RecvInfo": Private(
        f"{_STAGE}:_RecvInfo",
        "a receive buffer of its own length",
        ("input_name source buffer tensor_meta is_root_arg",),
    ),
    "get_recv_ops": Private(
        f"{_STAGE}:PipelineStage._get_recv_ops",
        "where a buffer is needed: allocated then, not for all micro-batches at once",
        ("self recv_infos", "self recv_infos group"),
    ),
    "prepare_forward": Private(
        f"{_STAGE}:PipelineStage._prepare_forward_infra", _STATIC, ("self num_microbatches args kwargs has_backward",)
    ),
    "prepare_backward": Private(
        f"{_STAGE}:PipelineStage._prepare_backward_infra",
        _STATIC,
        ("self num_microbatches loss_fn target received_grad_meta loss_kwargs",),
    ),
    "metadata_cleanup": Private(f"{_STAGE}:PipelineStage._post_metadata_inference_cleanup", _STATIC, ("self",)),
    "extract_tensor_meta": Private(
        "torch.distributed.pipelining._utils:extract_tensor_meta", "what a RecvInfo holds", ("tensor",)
    ),
    "extract_tensor_metas": Private(
        "torch.distributed.pipelining._utils:extract_tensor_metas", "what a stage holds", ("tensors allow_none",)
    ),
    "flatten_mesh": Private(f"{_MESH}:DeviceMesh._flatten", _DIMENSION, ("self mesh_dim_name backend_override",)),
    "concatenate_meshes": Private(f"{_MESH}:DeviceMesh._concatenate", _DIMENSION, ("device_mesh_list",)),
    "set_timeout": Private(
        "torch.distributed.distributed_c10d:_set_pg_timeout", "public since 2.14 only", ("timeout group",)
    ),
    "checkpoint_wrapper": Private(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper",
        "activation checkpointing as a module, as torchtitan has it",
        ("module checkpoint_impl checkpoint_fn checkpoint_fn_kwargs",),
    ),
    "functorch_config": Private("torch._functorch:config", "donated_buffer: compiled graphs whose backward runs twice"),
    "LoadBalancer": Private(f"{_BALANCER}:_LoadBalancer", _ORDER),
    "generate_indices": Private(f"{_BALANCER}:_LoadBalancer._generate_indices", _ORDER, ("self restore",)),
    "all_gather": Private(
        "torch:ops._c10d_functional.all_gather_into_tensor", _COLLECTIVE, ("input group_size group_name",)
    ),
    "reduce_scatter": Private(
        "torch:ops._c10d_functional.reduce_scatter_tensor", _COLLECTIVE, ("input reduce_op group_size group_name",)
    ),
    "wait_tensor": Private("torch:ops._c10d_functional.wait_tensor", _COLLECTIVE, ("tensor",)),
    "cpu_flash": Private(
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
        _KERNEL,
        ("query key value dropout_p is_causal attn_mask scale",),
    ),
    "cpu_flash_backward": Private(
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        _KERNEL,
        ("grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",),
    ),
    "cuda_flash": Private(
        "torch:ops.aten._flash_attention_forward",
        _KERNEL,
        (
            "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale "
            "window_size_left window_size_right seqused_k alibi_slopes",
        ),
    ),
    "cuda_flash_backward": Private(
        "torch:ops.aten._flash_attention_backward",
        _KERNEL,
        (
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state "
            "unused scale window_size_left window_size_right",
        ),
    ),
}


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(name)
    return PRIVATE[name].find()


def changes(private: Private) -> str:
    """What of a private name is not as it was run, "" if nothing."""
    try:
        found = private.find()
    except (AttributeError, ImportError) as error:
        return f"{private.path} is gone ({error}); it is used because: {private.why}"
    if not private.parameters:
        return ""
    if hasattr(found, "overloads"):  # an operator
        now = " ".join(a.name for a in found.default._schema.arguments)
    else:
        now = " ".join(inspect.signature(found).parameters)
    if now in private.parameters:
        return ""
    return f"{private.path} takes ({now}), it was run with ({') or ('.join(private.parameters)})"

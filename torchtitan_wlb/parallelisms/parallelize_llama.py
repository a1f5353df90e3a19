"""Make one stage of the model parallel: tensor -> context -> activation checkpointing -> compile -> FSDP2, in this
order.

Tensor parallelism must come first (it turns parameters into DTensors), recomputation wraps blocks before they are
compiled, and FSDP2 comes last because it takes parameters as they then are. FSDP2 is applied in every layout, also over
one rank: one code path for precision, gradient reduction and checkpoints.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchtitan_wlb.models.attention import Kernel
from torchtitan_wlb.models.llama import ModelArgs, Transformer
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.tensor_parallel import apply_tp


def parallelize_llama(
    model: Transformer,
    mesh: DeviceMesh,
    dims: ParallelDims,
    cp_group: dist.ProcessGroup | None,
    *,
    kernel: Kernel,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    ac_mode: str = "none",
    ac_every: int = 1,
    compile: bool = False,
    recompute_kv: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """Apply all parallelisms to a stage on the meta device, in place.

    Args:
        mesh, cp_group: as built by ParallelDims.build_mesh and build_cp_group.
        kernel: attention kernel (models/attention.py).
        param_dtype, reduce_dtype: of parameters and activations, and of the gradient reduction.
        ac_mode: none, selective (every ac_every-th block) or full.
        recompute_kv: exchange K/V again in backward instead of keeping what was received.
        reshard_after_forward: free gathered parameters between forward and backward.
    """
    if dims.tp > 1:
        apply_tp(model, mesh["tp"])
    for block in model.layers.values():
        block.attention.kernel = kernel
        block.attention.cp_group = cp_group
        block.attention.recompute_kv = recompute_kv
    if ac_mode != "none":
        apply_ac(model, 1 if ac_mode == "full" else ac_every)
    if compile:
        apply_compile(model)
    apply_fsdp(model, dims.fsdp_mesh(mesh), param_dtype, reduce_dtype, reshard_after_forward)


def build_stage(
    args: ModelArgs,
    layers: range,
    mesh: DeviceMesh,
    dims: ParallelDims,
    cp_group: dist.ProcessGroup | None,
    *,
    n_ids: int,
    max_position: int,
    loss_chunk: int,
    seed: int,
    device: torch.device,
    **how,
) -> Transformer:
    """Some layers of the model: made on the meta device, parallel, then filled in place.

    Args:
        args, layers, n_ids, max_position, loss_chunk: see Transformer.
        mesh, dims, cp_group, how: see parallelize_llama.
        seed: of the initial weights, which are the same in every layout.
        device: where the weights live.
    """
    with torch.device("meta"):
        model = Transformer(args, n_ids=n_ids, max_position=max_position, loss_chunk=loss_chunk, layers=layers)
    parallelize_llama(model, mesh, dims, cp_group, **how)
    model.to_empty(device=device)
    model.init_weights(seed, device)
    return model


def apply_ac(model: Transformer, every: int) -> None:
    """Recompute the activations of every n-th block in backward."""
    for i, name in enumerate(list(model.layers)):
        if i % every == 0:
            model.layers[name] = checkpoint_wrapper(model.layers[name], preserve_rng_state=False)


def apply_compile(model: Transformer) -> None:
    """Compile every block once for all sequence lengths; attention breaks the graph (see SelfAttention.attend)."""
    # Schedules that split the backward run a graph's backward twice, once for the inputs and once for the weights.
    torch._functorch.config.donated_buffer = False
    for block in model.layers.values():
        block.compile(dynamic=True)


def apply_fsdp(
    model: Transformer, mesh: DeviceMesh, param_dtype: torch.dtype, reduce_dtype: torch.dtype, reshard: bool
) -> None:
    """Shard every block, the head and what is left; gradients are *summed* over ranks, since the loss is already
    divided by the valid tokens of the whole step."""
    # Inputs keep their types: activations have the parameters' already, and the rotary table stays fp32.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if model.output is not None:
        # Needed again at once in backward: never resharded in between.
        fully_shard(model.output, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # gloo has no pre-multiplied sum, so the factor of 1 needs the plain sum.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

"""Make one stage of the model parallel: tensor -> context -> activation checkpointing -> compile -> FSDP2, in this
order.

Tensor parallelism must come first (it turns parameters into DTensors), recomputation wraps blocks before they are
compiled, and FSDP2 comes last because it takes parameters as they then are. FSDP2 is applied in every layout, also over
one rank: one code path for precision, gradient reduction and checkpoints.
"""

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchtitan_wlb.models.attention import Kernel
from torchtitan_wlb.models.llama import ModelArgs, Transformer
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims


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


class ReplicatedKVHeads(ParallelStyle):
    """Key or value projection when there are more TP ranks than K/V heads: TP / Hkv ranks compute the same head.

    The weight is replicated over TP, every rank multiplies with the rows of its one head, and the gradient of the
    weight is a partial sum that FSDP2 reduces over TP (it redistributes gradients to the parameter's placement).
    """

    def __init__(self, head_dim: int):
        super().__init__()
        self.head_dim = head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, tp = device_mesh.get_local_rank(), device_mesh.size()
        n_kv_heads = module.out_features // self.head_dim
        first = rank * n_kv_heads // tp * self.head_dim
        rows = slice(first, first + self.head_dim)

        def replicate(name: str, m: nn.Module, mesh: DeviceMesh) -> None:
            m.register_parameter(
                "weight", nn.Parameter(distribute_tensor(cast(nn.Parameter, m.weight), mesh, [Replicate()]))
            )

        def forward(x: DTensor) -> torch.Tensor:
            # Partial: every rank sees its own heads' share of both gradients.
            local = x.to_local(grad_placements=[Partial()])
            return F.linear(local, module.weight.to_local(grad_placements=[Partial()])[rows])

        module.forward = forward  # type: ignore[assignment, method-assign]
        return distribute_module(module, device_mesh, replicate)


def apply_tp(model: Transformer, mesh: DeviceMesh) -> None:
    """Megatron-style tensor parallelism with sequence parallelism, as DTensor plans.

    Between blocks every rank holds T/CP/TP tokens; a block gathers them before its column-wise products and scatters
    the sum of its row-wise ones.
    """
    plan: dict[str, ParallelStyle] = {}
    if model.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if model.output is not None:
        plan["norm"] = SequenceParallel()
        model.output.weight = nn.Parameter(distribute_tensor(model.output.weight, mesh, [Shard(0)]))
        model.output.tp_group = mesh.get_group()
    if plan:
        parallelize_module(model, mesh, plan)
    n_kv_heads = model.args.n_kv_heads
    kv = ColwiseParallel() if n_kv_heads % mesh.size() == 0 else ReplicatedKVHeads(model.args.head_dim)
    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.wq": ColwiseParallel(),
                "attention.wk": kv,
                "attention.wv": kv,
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


def apply_ac(model: Transformer, every: int) -> None:
    """Recompute the activations of every n-th block in backward."""
    for i, name in enumerate(list(model.layers)):
        if i % every == 0:
            model.layers[name] = checkpoint_wrapper(model.layers[name], preserve_rng_state=False)


def apply_compile(model: Transformer) -> None:
    """Compile every block once for all sequence lengths; attention breaks the graph (see SelfAttention.attend)."""
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

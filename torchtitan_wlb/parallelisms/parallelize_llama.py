"""Make one stage of the model parallel: tensor -> context -> activation checkpointing -> compile -> FSDP2, in this
order.

Tensor parallelism must come first (it turns parameters into DTensors), a compiled block holds its recomputation, so
that the compiler sees what is kept, and FSDP2 comes last because it takes parameters as they then are. FSDP2 is applied
in every layout, also over one rank: one code path for precision, gradient reduction and checkpoints.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_wlb.context_parallel.attention import ContextParallelAttention, shard_attention
from torchtitan_wlb.models.attention import AttentionMeta, packed_attention
from torchtitan_wlb.models.kernels import Kernel
from torchtitan_wlb.models.llama import Transformer
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.tensor_parallel import (
    ColwiseTokens,
    GatherTokens,
    HeadTokens,
    RowwiseTokens,
    TokenNorm,
    VocabEmbedding,
    VocabHead,
)
from torchtitan_wlb.torch_private import (
    checkpoint_wrapper,
    enable_symmetric_memory,
    functorch_config,
    inductor_config,
    reduce_scatter,
)


def parallelize_llama(
    model: Transformer,
    world_mesh: DeviceMesh,
    parallel_dims: ParallelDims,
    *,
    kernel: Kernel,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    ac: str | int = "none",
    compile: str = "",
    async_tp: bool = False,
    recompute_kv: bool = False,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> None:
    """Apply all parallelisms to a stage on the meta device, in place.

    Args:
        world_mesh: as built by ParallelDims.build_mesh.
        kernel: attention kernel (models/kernels.py).
        param_dtype, reduce_dtype: of parameters and activations, and of the gradient reduction.
        ac: activation checkpointing, see apply_ac.
        compile: backend of torch.compile; empty: blocks are not compiled.
        async_tp: overlap collectives of tensor parallelism with matrix products; compiled on CUDA only.
        recompute_kv: exchange K/V again in backward instead of keeping what was received.
        reshard_after_forward: free gathered parameters between forward and backward.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
    """
    if parallel_dims.tp > 1:
        apply_tp(model, world_mesh["tp"])
    if parallel_dims.cp > 1:
        apply_cp(model, world_mesh["cp"], kernel, recompute_kv)
    apply_ac(model, ac, tp=parallel_dims.tp > 1)
    if compile:
        apply_compile(model, compile)
    if async_tp:
        inductor_config._micro_pipeline_tp = True
        enable_symmetric_memory(world_mesh["tp"].get_group().group_name)
    fsdp_mesh = parallel_dims.fsdp_mesh(world_mesh)
    model.tie()
    apply_fsdp(model, fsdp_mesh, param_dtype, reduce_dtype, reshard_after_forward, cpu_offload)


def build_stage(
    args: ModelArgs,
    layers: range,
    world_mesh: DeviceMesh,
    parallel_dims: ParallelDims,
    *,
    kernel: Kernel,
    n_ids: int,
    max_position: int,
    loss_chunk: int,
    seed: int,
    device: torch.device,
    **how,
) -> Transformer:
    """Some layers of the model: made on the meta device, parallel, then filled in place.

    Args:
        args, layers, kernel, n_ids, max_position, loss_chunk: see Transformer.
        world_mesh, parallel_dims, how: see parallelize_llama.
        seed: of the initial weights, which are the same in every layout.
        device: where the model computes (its weights live on the host with cpu_offload).
    """
    sizes = {"n_ids": n_ids, "max_position": max_position, "loss_chunk": loss_chunk}
    with torch.device("meta"):
        model = Transformer(args, layers=layers, kernel=kernel, **sizes)
    parallelize_llama(model, world_mesh, parallel_dims, kernel=kernel, **how)
    home = torch.device("cpu") if how.get("cpu_offload") else device
    model.to_empty(device=home)
    model.init_weights(seed, home)
    for name, buffer in list(model.named_buffers()):  # the rotary table is no parameter: it stays where it is used
        model.register_buffer(name, buffer.to(device), persistent=False)
    return model


def apply_tp(model: Transformer, tp_mesh: DeviceMesh) -> None:
    """Heads, ffn_dim and vocabulary must divide by TP; K/V heads too, or TP by their number."""
    outside: dict[str, ParallelStyle] = {
        "tok_embeddings": VocabEmbedding(),
        "norm": TokenNorm(),
        "output": VocabHead(),
    }
    present = {name: style for name, style in outside.items() if getattr(model, name) is not None}
    parallelize_module(model, tp_mesh, present)

    divides = model.args.n_kv_heads % tp_mesh.size() == 0
    kv_projection = ColwiseTokens() if divides else HeadTokens(model.args.head_dim)
    layer_plan: dict[str, ParallelStyle] = {
        "attention_norm": TokenNorm(),
        "attention": GatherTokens(),
        "attention.wq": ColwiseTokens(),
        "attention.wk": kv_projection,
        "attention.wv": kv_projection,
        "attention.q_norm": TokenNorm(),
        "attention.k_norm": TokenNorm(),
        "attention.wo": RowwiseTokens(),
        "ffn_norm": TokenNorm(),
        "feed_forward": GatherTokens(),
        "feed_forward.w1": ColwiseTokens(),
        "feed_forward.w2": RowwiseTokens(),
        "feed_forward.w3": ColwiseTokens(),
    }
    if not model.args.has_qk_norm:
        del layer_plan["attention.q_norm"], layer_plan["attention.k_norm"]
    for block in model.layers.values():
        parallelize_module(block, tp_mesh, layer_plan)


def apply_cp(model: Transformer, cp_mesh: DeviceMesh, kernel: Kernel, recompute_kv: bool) -> None:
    """Attention over the tokens of all context-parallel ranks; nothing else in a block looks at other tokens."""
    for block in model.layers.values():
        block.attention.inner_attention = ContextParallelAttention(kernel, cp_mesh.get_group(), recompute_kv)


_ATTENTION = (packed_attention, shard_attention)
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _keep_attention():
    return create_selective_checkpoint_contexts(list(_ATTENTION))


def _keep_products(tp: bool):
    """Of a block's products wq, wk, wv, wo, w1, w3, w2: all but the last, whose output only leaves the block, and with
    tensor parallelism the sum over ranks of wo instead of every rank's large part of it."""
    seen: dict[tuple[bool, Any], int] = defaultdict(int)

    def keep(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        number = seen[ctx.is_recompute, op]
        seen[ctx.is_recompute, op] += 1
        is_kept = op in _ATTENTION or (op in _PRODUCTS and number < 6 and not (tp and number == 3))
        is_kept |= op is reduce_scatter.default and number == 0
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep)


def apply_ac(model: Transformer, ac: str | int, tp: bool = False) -> None:
    """Compute activations of blocks again in backward.

    Args:
        ac: `none`; `full`: keep a block's input and its attention (output, log-sum-exp, received K/V) only; a number n:
            `full` in every n-th block; `op`: keep the matrix products too, so that only what is cheap runs again.
        tp: whether there is tensor parallelism, whose gathers run again in both.
    """
    if ac == "none":
        return
    every = ac if isinstance(ac, int) else 1
    keeping = partial(_keep_products, tp) if ac == "op" else _keep_attention
    for name in list(model.layers)[::every]:
        model.layers[name] = checkpoint_wrapper(model.layers[name], preserve_rng_state=False, context_fn=keeping)


def apply_compile(model: Transformer, backend: str = "inductor") -> None:
    """Compile every block as one graph for all sequence lengths; its forward only, since FSDP's hooks around it are not
    to be compiled."""
    # Schedules that split the backward run a graph's backward twice, once for the inputs and once for the weights.
    functorch_config.donated_buffer = False
    for block in model.layers.values():
        block.forward = _any_length(torch.compile(block.forward, fullgraph=True, backend=backend))


def _any_length(forward: Callable) -> Callable:
    """Say which sizes change: `dynamic=True` would take widths for unknown, too, and trace and compute more slowly."""

    def marked(x: torch.Tensor, rope: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        torch._dynamo.maybe_mark_dynamic(x, 1)
        for tensor in (rope, *vars(meta).values()):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return forward(x, rope=rope, meta=meta)

    return marked


def apply_fsdp(
    model: Transformer,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    cpu_offload: bool = False,
) -> None:
    """Shard every block, the head and what is left; gradients are *summed* over ranks, since the loss is already
    divided by the valid tokens of the whole step."""
    # Inputs keep their types: activations have the parameters' already, and the rotary table stays fp32.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for block in model.layers.values():
        shard(block, reshard_after_forward=reshard_after_forward)
    if model.output is not None and not (model.args.is_tied and model.tok_embeddings is not None):
        # Needed again at once in backward: never resharded in between.
        shard(model.output, reshard_after_forward=False)
    shard(model, reshard_after_forward=reshard_after_forward)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # gloo has no pre-multiplied sum, so the factor of 1 needs the plain sum.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

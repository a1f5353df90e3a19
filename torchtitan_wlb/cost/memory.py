"""Predicted bytes of a rank: weights, gradients, optimizer, and what micro-batches keep for backward. No torch.

    bytes a token of T/CP that a block keeps  x  blocks of the rank  x  tokens of the micro-batches alive at once

A micro-batch is alive in a stage from its forward to the end of its backward; the schedule's own actions say how many
are at once. What FSDP's buffers, temporaries of kernels and fragments of an allocator take comes on top.
"""

from torchtitan_wlb.cost.model_shape import ModelShape
from torchtitan_wlb.cost.step_time import Action, stages_of


def block_bytes(
    shape: ModelShape, *, tp: int, value_bytes: int, ac: str | int = "none", received: float = 0.0
) -> dict[str, float]:
    """Bytes that a block keeps for backward, a token of T/CP, by what they are (parallelize_llama.apply_ac says what
    each mode keeps).

    Args:
        value_bytes: of an activation. ac: `none`, `op`, `full`, or n for `full` in every n-th block (the average).
        received: tokens of K and V from other context-parallel ranks, a token of T/CP.
    """
    if isinstance(ac, int):
        kept, rest = (
            block_bytes(shape, tp=tp, value_bytes=value_bytes, ac=a, received=received) for a in ("full", "none")
        )
        return {k: kept.get(k, 0.0) / ac + v * (1 - 1 / ac) for k, v in rest.items()}
    own, gathered = shape.dim * value_bytes / tp, shape.dim * value_bytes
    heads, kv = shape.n_heads * shape.head_dim * value_bytes / tp, max(1, shape.n_kv_heads / tp) * shape.head_dim
    kv *= value_bytes
    feature = shape.ffn_dim * value_bytes / tp
    attention = {
        "input": own,
        "attention output": heads,
        "log-sum-exp": 4.0 * shape.n_heads / tp,
        "received K and V": 2 * kv * received,
    }
    if ac == "full":
        return attention
    products = {"q, k, v": heads + 2 * kv, "residual": own}
    if ac == "op":
        return {**attention, **products, "w1, w3": 2 * feature}
    # Norms keep what they have normalised by; tensor parallelism gathers what they return.
    norms = {"normed": 2 * gathered, "norms": 2 * 4.0 / tp}
    return {**attention, **products, **norms, "w1, silu, w3, product": 4 * feature}


def most_alive(actions: list[Action]) -> int:
    """How many (stage, micro-batch) of one rank's actions are alive at once at most."""
    alive: set[tuple[int, int]] = set()
    most = 0
    for kind, stage, i in actions:
        if kind == "F":
            alive.add((stage, i))
        elif kind in "BW":  # a backward in one, or the second half of a split one
            alive.discard((stage, i))
        most = max(most, len(alive))
    return most


def in_flight(actions: list[list[Action]]) -> int:
    """Micro-batches, whole ones in all stages of a rank, that are alive at once on the rank with most."""
    return max(-(-most_alive(each) // len(stages_of(each))) for each in actions)


def rank_bytes(
    shape: ModelShape,
    *,
    layers: int,
    has_embedding: bool,
    has_head: bool,
    tp: int,
    fsdp: int,
    value_bytes: int,
    ac: str | int,
    tokens_alive: float,
    largest: float,
    received: float = 0.0,
    keeps_gathered: bool = True,
    accumulates: bool = True,
    optimizer_bytes: int = 8,
    loss_chunk: int = 1024,
) -> dict[str, float]:
    """Bytes of a rank at the peak of a step, by what they are.

    Args:
        layers: blocks of the rank. fsdp: ranks over which weights are sharded.
        tokens_alive: tokens of T/CP of all micro-batches alive at once. largest: of the largest one.
        received: see block_bytes.
        keeps_gathered: weights stay gathered over the step (else two blocks at once).
        accumulates: gradients stay whole until the last micro-batch (else one block at once).
        optimizer_bytes: of state a weight.
        loss_chunk: tokens whose logits exist at once.
    """
    block = shape.layer_flops_per_token / 2 / tp + 2 * shape.dim
    head = shape.dim * shape.vocab_size / tp
    ends = 1 if shape.is_tied and has_embedding and has_head else has_embedding + has_head
    weights = layers * block + ends * head
    gathered = weights if keeps_gathered else min(layers, 2) * block + has_head * head
    whole_gradients = weights if accumulates else block + has_head * head
    kept = {
        mode: sum(block_bytes(shape, tp=tp, value_bytes=value_bytes, ac=mode, received=received).values())
        for mode in {ac, "none"}
    }
    loss = (loss_chunk * shape.vocab_size / tp * 3 + head) * 4 + 2 * largest * shape.dim * value_bytes
    return {
        "weights, gradients, optimizer": weights / fsdp * (8 + optimizer_bytes),
        "gathered weights": gathered * value_bytes,
        "whole gradients": whole_gradients * 4,
        "activations": tokens_alive * layers * kept[ac],
        "block in backward": largest * kept["none"],
        "head and loss": has_head * loss,
    }

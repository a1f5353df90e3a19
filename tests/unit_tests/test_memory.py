"""What is predicted to be kept in memory against what is: tensors alive after a forward, micro-batches alive in a
schedule."""

import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.recipe import resolve_recipe
from torchtitan_wlb.config_manager import load_config
from torchtitan_wlb.cost.memory import block_bytes, in_flight, most_alive
from torchtitan_wlb.cost.step_time import stages_of
from torchtitan_wlb.models.attention import AttentionMeta
from torchtitan_wlb.models.llama import Transformer
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.models.rotary import rotary_table
from torchtitan_wlb.parallelisms.memory_estimate import estimate_memory, largest_that_fits
from torchtitan_wlb.parallelisms.parallelize_llama import apply_ac
from torchtitan_wlb.parallelisms.schedules import schedule_actions

ROOT = Path(__file__).parents[2]
ARGS = ModelArgs(dim=128, n_layers=4, n_heads=8, n_kv_heads=2, ffn_dim=320, vocab_size=128)


class Alive(TorchDispatchMode):
    """Remembers every storage that an operator makes."""

    def __init__(self):
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.made[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        return result

    def bytes(self, without: list[torch.Tensor]) -> int:
        gc.collect()
        alive = {ref.cdata: size for ref, size in self.made.items() if not ref.expired()}
        return sum(size for key, size in alive.items() if key not in {t.untyped_storage()._cdata for t in without})


@pytest.mark.parametrize("ac", ["none", "op", "full", 2])
@pytest.mark.parametrize("tokens", [1024, 2048])
def test_a_block_keeps_what_the_table_says(ac, tokens):
    model = Transformer(ARGS, n_ids=128, max_position=tokens)
    model.init_weights(0, torch.device("cpu"))
    apply_ac(model, ac)
    x = torch.randn(1, tokens, ARGS.dim, requires_grad=True)
    rope, meta = rotary_table(ARGS, tokens, torch.device("cpu")), AttentionMeta.of([tokens // 2, tokens // 4])
    with Alive() as alive:
        for block in model.layers.values():
            x = block(x, rope=rope, meta=meta)
        # With the last block's output, in the place of the first one's input.
        kept = alive.bytes(without=list(model.parameters()))
        x.sum().backward()
    table = block_bytes(ARGS, tp=1, value_bytes=4, ac=ac)
    if "normed" in table:  # where it is not one kernel, RMSNorm keeps what it has normalised, too
        table["normed"] += 2 * ARGS.dim * 4 * (0.5 if ac == 2 else 1)
    assert kept == pytest.approx(sum(table.values()) * tokens * ARGS.n_layers, rel=0.02), table


@pytest.mark.parametrize("schedule, pp, m, v, expected", [
    ("GPipe", 4, 8, 1, 8), ("1F1B", 4, 8, 1, 4), ("Interleaved1F1B", 4, 8, 2, 11), ("Interleaved1F1B", 8, 16, 2, 23),
    ("LoopedBFS", 4, 8, 2, 16),
])  # fmt: skip
def test_micro_batches_alive(schedule, pp, m, v, expected):
    actions = schedule_actions(schedule, pp, m, v)
    assert max(map(most_alive, actions)) == expected
    assert in_flight(actions) == -(-expected // len(stages_of(actions[0])))


def test_the_largest_micro_batch_that_fits():
    recipe = resolve_recipe(load_config(["--job.config_file", str(ROOT / "train_configs/llama_7b_128k_wlb.toml")]))
    plan, settings = recipe.pipeline_plan(), recipe.settings
    estimate = partial(estimate_memory, recipe.config, recipe.dims, recipe.args, plan, reshards=False)
    whole = sum(estimate(settings).values())
    fits = largest_that_fits(whole, estimate, settings)
    assert settings.s_max <= fits < 1.01 * settings.s_max and largest_that_fits(1.0, estimate, settings) == 0
    # Weights by hand: 7B in 8 x 4 parts, sharded over two context-parallel ranks, 16 bytes each with AdamW.
    assert estimate(settings)["weights, gradients, optimizer"] == pytest.approx(6.7e9 / 32 / 2 * 16, rel=0.05)

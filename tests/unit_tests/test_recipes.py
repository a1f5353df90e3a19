"""Every recipe: its model, layout and plan can be built, and its header says what is estimated."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from scripts.recipe import resolve_recipe
from torchtitan_wlb.config_manager import load_config
from torchtitan_wlb.layout_packing import reshards_parameters
from torchtitan_wlb.models.llama import Transformer
from torchtitan_wlb.parallelisms.memory_estimate import estimate_memory

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_can_be_built_and_its_header_is_true(path):
    config = load_config(["--job.config_file", str(path)])
    recipe = resolve_recipe(config)
    head = path.read_text()
    accelerators = re.search(r"# Hardware: (\d+) ", head)
    assert accelerators is None or recipe.dims.world_size == int(accelerators[1])
    plan = recipe.pipeline_plan()
    assert sorted(i for stage in plan.stages for i in stage) == list(range(recipe.args.n_layers))
    with torch.device("meta"):
        stages = [
            Transformer(recipe.args, n_ids=recipe.args.n_ids, max_position=config.training.seq_len, layers=r)
            for r in plan.stages
        ]
    numbers = sum(p.numel() for stage in stages for p in stage.parameters())
    if recipe.args.is_tied:
        numbers -= recipe.args.dim * recipe.args.vocab_size
    if size := re.search(r"(\d+(?:\.\d+)?)B", head.splitlines()[0]):
        assert numbers == pytest.approx(float(size[1]) * 1e9, rel=0.25)
    if not (said := re.search(r"checkpointing mode: none (\d+), op (\d+), full (\d+)", head)):
        assert config.cost_model.device == "cpu" or path.stem == "debug_cpu"
        return
    reshards = reshards_parameters(config, recipe.dims, recipe.settings.n)
    estimate = partial(estimate_memory, config, recipe.dims, recipe.args, plan, recipe.settings, reshards=reshards)
    for mode, gb in zip(("none", "selective", "full"), said.groups()):
        config.activation_checkpoint.mode = mode
        assert sum(estimate().values()) / 1e9 == pytest.approx(int(gb), abs=0.51), mode
    config.activation_checkpoint.mode = load_config(["--job.config_file", str(path)]).activation_checkpoint.mode
    assert sum(estimate().values()) < 75e9

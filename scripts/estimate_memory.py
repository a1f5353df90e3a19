"""What the fullest rank of a recipe holds in memory, for every mode of activation checkpointing, and the largest
micro-batch (packing.max_len_factor x training.seq_len) that fits a device.

    python scripts/estimate_memory.py --job.config_file F.toml [--memory_gb 80] [--section.key value ...]

Add a few GB for what the estimate leaves out: communication buffers, temporaries of kernels, fragmentation.
"""

import argparse
import sys
from functools import partial

from scripts.recipe import resolve_recipe
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.layout_packing import reshards_parameters
from torchtitan_wlb.logger import init_logger
from torchtitan_wlb.parallelisms.memory_estimate import estimate_memory, in_words, largest_that_fits


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory_gb", type=float, default=0.0, help="of a device; without, what the recipe's has")
    arguments, rest = parser.parse_known_args(argv)
    config = load_config(rest)
    recipe = resolve_recipe(config)
    memory = arguments.memory_gb * 1e9 or DEVICES[recipe.device].memory
    settings, dims = recipe.settings, recipe.dims
    reshards = reshards_parameters(config, dims, settings.n)
    print(f"{dims}; {settings.n} micro-batches of {settings.micro_batch_tokens:,} tokens on average")
    print(f"S_max {settings.s_max:,} tokens; {memory / 1e9:.0f} GB a device")
    for ac in ("none", "op", "full"):
        config.activation_checkpoint.mode = "selective" if ac == "op" else ac  # type: ignore[assignment]
        config.activation_checkpoint.selective_ac_option = "op"
        estimate = partial(estimate_memory, config, dims, recipe.args, recipe.pipeline_plan(), reshards=reshards)
        fits = largest_that_fits(memory, estimate, settings)
        print(f"{ac:5} {in_words(estimate(settings))}; S_max that fits: {fits:,}")


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(sys.argv[1:])

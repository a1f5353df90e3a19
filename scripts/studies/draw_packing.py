"""The same documents, the same pipeline, three ways to pack: the picture of the README.

    python scripts/studies/draw_packing.py --lengths L.json --plot assets/images/three_ways.png [--steps 4]

A list of documents of --steps steps of the 7B recipe (TP8 CP2 PP4, Interleaved1F1B) is packed to its end by plain, by
wlb with four micro-batches as equal as can be, and by wlb with sixteen micro-batches of a quarter of the window on
average, for the time of the step. Drawn is what the time model of the schedule says each pipeline rank does when; a
colour is a micro-batch, darker the longer its longest document.
"""

import argparse
import sys
from dataclasses import replace

import numpy as np

from scripts.recipe import Lengths, resolve_recipe
from scripts.studies.study_steps import RECIPE
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.packing.objective import StepObjective
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.spans import lengths


def draw(axis, recipe, documents: Lengths, settings: PackingSettings, title: str) -> float:
    """Draw all steps of some settings one after the other; their seconds."""
    from matplotlib import colormaps

    colors, model, now = colormaps["viridis_r"], recipe.step_model(settings.n), 0.0
    waited = [0.0, 0]

    for plan in documents.planner(settings):
        order = list(range(settings.n))
        if settings.balances:
            order = model.choose_order(*plan.costs)
        longest = [max(lengths(plan.micro_batch(b)), default=0) / settings.seq_len for b in order]
        timeline = model.timeline(*(x[order] for x in plan.costs))
        for rank, (kind, _, i), begin, end in timeline:
            shade = colors(0.1 + 0.9 * longest[i])
            bar = {"color": shade, "edgecolor": "white", "linewidth": 0.3, "height": 0.9 if kind == "F" else 0.7}
            axis.barh(-rank, end - begin, left=now + begin, **bar)
        now += max(end for *_, end in timeline)
        waited = [waited[0] + plan.delay[0] * plan.tokens, waited[1] + plan.tokens]
        axis.axvline(now, color="black", linewidth=0.8)
    axis.set_title(f"{title}: {now:.1f} s, mean delay {waited[0] / waited[1]:.2f} steps", loc="left", fontsize=10)
    axis.set_yticks([-r for r in range(recipe.dims.pp)], [f"stage rank {r}" for r in range(recipe.dims.pp)], fontsize=7)
    return now


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--plot", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--from-document", dest="first", type=int, default=0)
    arguments, rest = parser.parse_known_args(argv)
    recipe = resolve_recipe(load_config([*RECIPE, *rest]), seed=0)
    base = recipe.settings
    documents = Lengths(arguments.lengths, recipe.config)
    documents.lengths = documents.lengths[arguments.first :]
    count = int(np.searchsorted(np.cumsum(documents.lengths), arguments.steps * base.n * base.seq_len))
    documents.lengths = documents.lengths[:count]
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(11, 5.4), sharex=True)
    finite = replace(base, epochs=1, delay_price=0.28)
    equal = replace(finite, objective=StepObjective(base.n, 0.0))
    ways = (
        (replace(finite, strategy="plain"), "plain, 4 x 128K"),
        (equal, "equal micro-batches, 4 x 128K on average"),
        (replace(finite, delay_price=0.35).split(4), "for the time of the step, 16 x 32K on average"),
    )
    seconds = [draw(axis, recipe, documents, *way) for axis, way in zip(axes, ways)]
    axes[-1].set_xlabel(f"predicted seconds for the same {count:,} documents, {documents.lengths.sum():,} tokens")
    figure.tight_layout()
    figure.savefig(arguments.plot, dpi=110)
    print({title: round(s, 2) for (_, title), s in zip(ways, seconds)})


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])

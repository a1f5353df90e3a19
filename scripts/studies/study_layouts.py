"""What packing for the time of a step gives over micro-batches of equal work, by layout.

    python scripts/studies/study_layouts.py --lengths L.json --out assets/results/step_objective.json

1. The 7B recipe at 128K, TP8 CP2 PP4, Interleaved1F1B, some data-parallel degrees: tokens/s over plain (sequences cut
   by position over context-parallel ranks) by the time model, for `wlb` with 1, 2 and 4 micro-batches in the place of a
   window, `wlb_equal` (all micro-batches of a step as equal as can be, whatever the layout) and `wlb_paper`.
   delay_price is the fastest with which these documents wait at most the target; the thresholds of wlb_paper
   are found by the tuner, for the larger target. Means over --seeds orders of --steps / DP steps (40 or more) after 50.
2. The same with one rank and 32K a micro-batch under bounds on the tokens of a step (packing.max_step_tokens_factor).
3. Without a pipeline: time over perfect and delay by data-parallel degree and micro-batches a rank.

Nothing is measured: costs are those of the built-in H100 model.
"""

import argparse
import sys
from dataclasses import replace
from itertools import islice, product

import numpy as np

from scripts.origin import write_results
from scripts.recipe import Lengths
from scripts.simulate_packing import WARMUP
from scripts.studies.study_packing import mean_quality
from scripts.studies.study_steps import Layout
from torchtitan_wlb.config_manager import exit_on_config_error
from torchtitan_wlb.logger import init_logger
from torchtitan_wlb.packing.objective import StepObjective
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.tuning import search_price, tune

WINDOW, SPLITS, TARGETS = 131072, (1, 2, 4), (0.4, 0.8)


def layout_of(dp: int, split: int) -> Layout:
    n = ["--training.global_batch_size", str(4 * dp * split), "--training.micro_batch_tokens", str(WINDOW // split)]
    return Layout(WINDOW, (8, 2, 4, dp), n)


def judge(layout: Layout, settings: PackingSettings, documents: Lengths, sharding: str, steps: int, seeds: int) -> dict:
    """Tokens/s by the time model, delay and imbalance."""
    seconds, tokens, waited, imbalance, varies = 0.0, 0, 0.0, [], []
    for seed in range(seeds):
        for plan in islice(documents.planner(replace(settings, seed=seed)), WARMUP, WARMUP + steps):
            seconds += layout.step_seconds(plan, settings, sharding)
            tokens += plan.tokens
            waited += plan.delay[0] * plan.tokens
            imbalance.append(plan.imbalance)
            varies.append(plan.tokens)
    return {
        "tokens_per_s": tokens / seconds,
        "delay": waited / tokens,
        "imbalance": float(np.mean(imbalance)),
        "tokens_sd": float(np.std(varies) / np.mean(varies)),
    }


def with_delay(settings: PackingSettings, target: float, documents: Lengths, steps: int, seeds: int) -> PackingSettings:
    """With the delay_price, to 2%, that is fastest by the objective among those with which these documents wait at most
    `target` steps."""

    def judge(price: float) -> tuple[float, float]:
        found = mean_quality(documents.planner, replace(settings, delay_price=price), steps, range(seeds))
        return found["delay_mean_steps"], found["speed"]

    return replace(settings, delay_price=search_price(judge, target, precision=1.01))


def with_pipeline(dp: int, documents: Lengths, steps: int, seeds: int) -> list[dict]:
    """Rows of one data-parallel degree, plain first."""
    layouts = {split: layout_of(dp, split) for split in SPLITS}
    variants = [("plain", 1, "per_sequence", 0.0), ("plain", 1, "adaptive", 0.0)]
    variants += [("wlb_equal", 1, "adaptive", t) for t in TARGETS]
    variants += [("wlb", split, "adaptive", t) for split in SPLITS for t in TARGETS]
    variants += [("wlb_paper", split, "adaptive", TARGETS[1]) for split in SPLITS]
    rows: list[dict] = []
    for strategy, split, sharding, target in variants:
        layout = layouts[split]
        settings = replace(layout.recipe.settings, strategy=strategy.removesuffix("_equal"))
        if strategy == "wlb_equal":
            settings = replace(settings, objective=StepObjective(settings.n, 0.0))
        if settings.strategy == "wlb":
            settings = with_delay(settings, target, documents, steps, seeds)
        else:
            settings = tune([settings], target, documents.planner)
        row: dict = {"pp": 4, "dp": dp, "n": settings.n, "micro_batch_tokens": settings.micro_batch_tokens}
        row |= {"packing": strategy, "sharding": sharding, "target_delay": target, "delay_price": settings.delay_price}
        row |= judge(layout, settings, documents, sharding, steps, seeds)
        row["over_plain"] = row["tokens_per_s"] / (rows or [row])[0]["tokens_per_s"]
        rows.append(row)
        print(row, flush=True)
    return rows


def bounded(factors: list[float], documents: Lengths, steps: int, seeds: int) -> list[dict]:
    """Rows of one pipeline with 16 micro-batches of 32K, by bound (0: none)."""
    layout, rows = layout_of(1, 4), []
    for factor, target in product(factors, TARGETS):
        settings = replace(layout.recipe.settings, strategy="wlb", max_step_tokens_factor=factor)
        settings = with_delay(settings, target, documents, steps, seeds)
        row: dict = {"pp": 4, "dp": 1, "n": settings.n, "max_step_tokens_factor": factor, "target_delay": target}
        row |= {"packing": "wlb", "delay_price": settings.delay_price}
        rows.append(row | judge(layout, settings, documents, "adaptive", steps, seeds))
        print(rows[-1], flush=True)
    return rows


def without_pipeline(dp: int, m: int, documents: Lengths, steps: int, seeds: int, base: PackingSettings) -> list[dict]:
    """Rows of one number of micro-batches a rank: balanced ranks, and equal micro-batches."""
    rows = []
    for strategy, objective in (("wlb", StepObjective(dp, 0.0)), ("wlb_equal", StepObjective(dp * m, 0.0))):
        settings = replace(base, n=dp * m, objective=objective, strategy="wlb", delay_price=0.0)
        target = 0.15 if strategy == "wlb" and m > 1 else 0.45
        settings = with_delay(settings, target, documents, steps, seeds)
        found = mean_quality(documents.planner, settings, steps, range(seeds), ranks=dp)
        row: dict = {"pp": 1, "dp": dp, "m": m, "packing": strategy, "delay_price": settings.delay_price}
        row |= {"time_vs_ideal": found["time_vs_ideal"], "delay": found["delay_mean_steps"]}
        rows.append(row)
        print(row, flush=True)
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dp", type=int, nargs="*", default=[1, 2, 8, 32], help="with a pipeline")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8, 64], help="data-parallel, without one")
    parser.add_argument("--factors", type=float, nargs="*", default=[0.0, 2.0, 1.5, 1.25, 1.0])
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args(argv)
    base = layout_of(1, 1).recipe
    documents, rows = Lengths(arguments.lengths, base.config), []
    for dp in arguments.ranks:
        for m in (1, 2, 4, 8):
            steps = max(min(40, arguments.steps), arguments.steps // dp)
            rows += without_pipeline(dp, m, documents, steps, arguments.seeds, base.settings)
    for dp in arguments.dp:
        steps = max(min(40, arguments.steps), arguments.steps // dp)
        rows += [row | {"steps": steps} for row in with_pipeline(dp, documents, steps, arguments.seeds)]
    rows += bounded(arguments.factors, documents, arguments.steps, arguments.seeds)
    write_results(arguments.out, rows, "cpu")


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(sys.argv[1:])

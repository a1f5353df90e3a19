"""The packing results of this repository, from lists of document lengths to assets/results/packing.json.

    python scripts/studies/study_packing.py --wlb_128k L.json --prolong L.json --out assets/results/packing.json

1. All strategies on the paper's distribution, 7B at 128K, N=4: means over five seeds, 500 steps after 50.
2. wlb with everything on auto: another 128K mix, and the standard library at 4,096 bytes.
3. Time to plan a step for N from 4 to 4,096, one core.
4. How far greedy packing of a step is from the optimum: integer program with a time limit on 100 real steps.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scripts.origin import write_results
from scripts.recipe import Lengths, MakePlanner, Recipe, resolve_recipe
from scripts.simulate_packing import WARMUP, settings_to_compare
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.packing.greedy import spread
from torchtitan_wlb.packing.quality import measure
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.solver import solve
from torchtitan_wlb.packing.spans import lengths, longest_first
from torchtitan_wlb.packing.tuning import tune

# With micro-batches of a window on average, as the paper's.
RECIPE = [
    "--job.config_file", "train_configs/llama_7b_128k_wlb.toml",
    "--training.global_batch_size", "-1", "--training.micro_batch_tokens", "-1",
]  # fmt: skip
SEEDS = range(5)


def mean_quality(
    make_planner: MakePlanner, settings: PackingSettings, steps: int, seeds: Sequence[int] = SEEDS, ranks: int = 0
) -> dict:
    """Means over seeds of every statistic of `measure`; of the ages the largest."""
    rows = [measure(make_planner(replace(settings, seed=seed)), steps, WARMUP, ranks=ranks).row() for seed in seeds]
    ages = ("delay_max_steps", "queue_age_max_steps")
    return {k: max(r[k] for r in rows) if k in ages else float(np.mean([r[k] for r in rows])) for k in rows[0]}


def compare(recipe: Recipe, documents: Lengths, steps: int) -> list[dict]:
    """A row for every strategy and setting."""
    equal_length = recipe.settings.cost.equal_length()
    rows = []
    for setting, settings in settings_to_compare(recipe, documents):
        row: dict = {"strategy": settings.strategy, "setting": setting, "equal_length": equal_length}
        if settings.strategy == "fixed_solver":  # slow: fewer steps, with the greedy one on the same steps beside it
            few = min(100, steps)
            row |= mean_quality(documents.planner, settings, few, [0])
            greedy = mean_quality(documents.planner, replace(settings, strategy="fixed"), few, [0])
            row["imbalance_mean_of_greedy_on_the_same_steps"] = greedy["imbalance_mean"]
        else:
            row |= mean_quality(documents.planner, settings, steps)
        rows.append(row)
        print(rows[-1], flush=True)
    return rows


def auto(name: str, recipe: Recipe, make_planner: MakePlanner, steps: int) -> dict:
    """wlb with delay_price found on the documents, beside plain; with at least 4 micro-batches a step."""
    base = replace(recipe.settings, n=max(4, recipe.settings.n))
    free = replace(base, strategy="wlb", delay_price=0.0)
    tuned = tune([free], recipe.config.packing.target_delay, make_planner)
    wlb, plain = (mean_quality(make_planner, s, steps) for s in (tuned, replace(base, strategy="plain")))
    excess = (wlb["imbalance_mean"] - 1) / (plain["imbalance_mean"] - 1)
    row = {"documents": name, "delay_price": tuned.delay_price, "wlb": wlb, "plain": plain, "excess_of_plain": excess}
    print(row, flush=True)
    return row


def scale(recipe: Recipe, documents: Lengths, steps: int) -> list[dict]:
    """A row for every N: quality and time to plan."""
    rows = []
    base = replace(recipe.settings, strategy="wlb", delay_price=0.16)
    for n in (4, 16, 64, 256, 1024, 4096):
        q = measure(documents.planner(replace(base, n=n)), min(steps, 200 if n <= 64 else 60), 30)
        rows.append({"n": n, "documents_per_step": q.tokens_per_step / documents.lengths.mean()} | q.row())
        print(rows[-1], flush=True)
    return rows


def optimality(recipe: Recipe, documents: Lengths, steps: int, seconds: float = 2.0) -> dict:
    """Largest over bound, of what wlb released in some steps: as it was packed, repacked by the solver, and the bound
    itself."""
    base = replace(recipe.settings, strategy="wlb", delay_price=0.16)
    greedy, refined = [], []
    for plan in documents.planner(base):
        if plan.step <= WARMUP:
            continue
        spans = longest_first(plan.spans)
        work, tokens = base.cost.documents(lengths(spans)), lengths(spans)
        where = spread(work, tokens, base.n, base.s_max)
        held = [base.cost.documents(lengths(plan.micro_batch(b))).sum() for b in range(base.n)]
        if (where < 0).any():  # wlb packs left-overs first; their order can be what makes everything fit
            where = np.concatenate([np.full(len(plan.micro_batch(b)), b) for b in range(base.n)])
            spans = plan.spans
            work, tokens = base.cost.documents(lengths(spans)), lengths(spans)
        solution = solve(work, tokens, base.n, base.s_max, where, nodes=10**6, seconds=seconds)
        greedy.append(max(held) / solution.bound)
        refined.append(solution.largest / solution.bound)
        if len(greedy) == steps:
            break
    row = {"seconds": seconds, "steps": steps}
    for name, values in (("greedy_over_bound", greedy), ("solver_over_bound", refined)):
        row |= {f"{name}_mean": float(np.mean(values)), f"{name}_p99": float(np.percentile(values, 99))}
    print(row, flush=True)
    return row


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wlb_128k", required=True)
    parser.add_argument("--prolong", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=500, help="judged of every setting; the slow ones get fewer")
    arguments, rest = parser.parse_known_args(argv)
    recipe = resolve_recipe(load_config([*RECIPE, *rest]), seed=0)
    debug = resolve_recipe(load_config(["--job.config_file", "train_configs/debug_cpu.toml", *rest]), seed=0)
    steps, documents = arguments.steps, Lengths(arguments.wlb_128k, recipe.config)
    another = Lengths(arguments.prolong, recipe.config)
    results = {
        "threads": 1,
        "python": platform.python_version(),
        "strategies": compare(recipe, documents, steps),
        "auto": [
            auto("another 128K mix", recipe, another.planner, steps),
            auto("standard library, 4,096 bytes", debug, debug.own_planner(), steps),
        ],
        "scale": scale(recipe, documents, steps),
        "optimality": optimality(recipe, documents, min(100, steps)),
    }
    write_results(arguments.out, results, "cpu")


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])

"""The packing results of this repository, from lists of document lengths to assets/results/packing.json.

    python scripts/study_packing.py --wlb_128k L.json --prolong L.json --out assets/results/packing.json

1. All strategies on the paper's distribution, 7B at 128K, N=4: means over five seeds, 500 steps after 50.
2. wlb with everything on auto: another 128K mix, and the standard library at 4,096 bytes.
3. Time to plan a step for N from 4 to 4,096, one core.
4. How far greedy packing of a step is from the optimum: integer program with a time limit on 100 real steps.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from simulate_packing import WARMUP, Stream, recipe_settings, settings_to_compare  # puts the repository on the path
from tune_packing import own_documents

from torchtitan_wlb.config_manager import load_config
from torchtitan_wlb.packing.greedy import spread
from torchtitan_wlb.packing.quality import measure
from torchtitan_wlb.packing.solver import solve
from torchtitan_wlb.packing.spans import lengths, longest_first
from torchtitan_wlb.packing.tuning import tune

RECIPE = ["--job.config_file", "train_configs/llama_7b_128k_wlb.toml"]
SEEDS = range(5)


def mean_quality(planner, settings, steps: int, seeds: Sequence[int] = SEEDS) -> dict:
    """Means over seeds of every statistic; of the ages the largest."""
    rows = [measure(planner(replace(settings, seed=seed)), steps, WARMUP).row() for seed in seeds]
    ages = ("delay_max_steps", "queue_age_max_steps")
    return {k: max(r[k] for r in rows) if k in ages else float(np.mean([r[k] for r in rows])) for k in rows[0]}


def compare(config, stream: Stream) -> list[dict]:
    base = recipe_settings(config, 0)
    rows = []
    for setting, settings in settings_to_compare(base, config.packing.target_delay, stream):
        row: dict = {"strategy": settings.strategy, "setting": setting, "equal_length": base.cost.equal_length()}
        if settings.strategy == "fixed_solver":  # slow: fewer steps, with the greedy one on the same steps beside it
            row |= mean_quality(stream.planner, settings, 100, [0])
            greedy = mean_quality(stream.planner, replace(settings, strategy="fixed"), 100, [0])
            row["imbalance_mean_of_greedy_on_the_same_steps"] = greedy["imbalance_mean"]
        else:
            row |= mean_quality(stream.planner, settings, 500)
        rows.append(row)
        print(rows[-1], flush=True)
    return rows


def auto(name: str, config, planner) -> dict:
    """wlb with delay_price found on the documents, beside plain."""
    base = recipe_settings(config, 0)
    if base.n < 4:
        base = replace(base, n=4)
    tuned = tune(replace(base, strategy="wlb", delay_price=0.0), config.packing.target_delay, planner)
    wlb, plain = (mean_quality(planner, s, 500) for s in (tuned, replace(base, strategy="plain")))
    excess = (wlb["imbalance_mean"] - 1) / (plain["imbalance_mean"] - 1)
    row = {"documents": name, "delay_price": tuned.delay_price, "wlb": wlb, "plain": plain, "excess_of_plain": excess}
    print(row, flush=True)
    return row


def scale(config, stream: Stream) -> list[dict]:
    rows = []
    base = replace(recipe_settings(config, 0), strategy="wlb", delay_price=0.16)
    for n in (4, 16, 64, 256, 1024, 4096):
        q = measure(stream.planner(replace(base, n=n)), 200 if n <= 64 else 60, 30)
        rows.append({"n": n, "documents_per_step": q.tokens_per_step / stream.lengths.mean()} | q.row())
        print(rows[-1], flush=True)
    return rows


def optimality(config, stream: Stream, seconds: float = 2.0) -> dict:
    """Largest over bound, of what wlb released in 100 steps: as it was packed, repacked by the solver, and the bound
    itself."""
    base = replace(recipe_settings(config, 0), strategy="wlb", delay_price=0.16)
    greedy, refined = [], []
    for plan in stream.planner(base):
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
        if len(greedy) == 100:
            break
    row = {"seconds": seconds, "steps": 100}
    for name, values in (("greedy_over_bound", greedy), ("solver_over_bound", refined)):
        row |= {f"{name}_mean": float(np.mean(values)), f"{name}_p99": float(np.percentile(values, 99))}
    print(row, flush=True)
    return row


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wlb_128k", required=True)
    parser.add_argument("--prolong", required=True)
    parser.add_argument("--out", required=True)
    arguments, rest = parser.parse_known_args(argv)
    config = load_config([*RECIPE, *rest])
    debug = load_config(["--job.config_file", "train_configs/debug_cpu.toml", *rest])
    stream = Stream(arguments.wlb_128k, config)
    results = {
        "hardware": "one core of a 2-core x86 CPU",
        "python": platform.python_version(),
        "strategies": compare(config, stream),
        "auto": [
            auto("another 128K mix", config, Stream(arguments.prolong, config).planner),
            auto("standard library, 4,096 bytes", debug, own_documents(debug)),
        ],
        "scale": scale(config, stream),
        "optimality": optimality(config, stream),
    }
    Path(arguments.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])

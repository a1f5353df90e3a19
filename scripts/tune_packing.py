"""What packing can give in a recipe's layout: predicted tokens/s against delay, as a table, a picture, and the chosen
setting as TOML to paste.

    python scripts/tune_packing.py --job.config_file F.toml [--lengths L.json] [--steps 300] [--json OUT] [--plot P.png]

Without --lengths the recipe's own documents are used (prepared if need be). wlb is tried over delay_price, with 1 to 8
micro-batches in the place of a window where the schedule allows it; wlb_paper over one to three thresholds. Tokens/s
are over `plain`, by the time model of the recipe's schedule; delay is in steps, which have the same tokens on average
in every row. Chosen is the fastest of wlb whose mean delay is within packing.target_delay.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from tqdm import tqdm

from scripts.origin import write_results
from scripts.recipe import Lengths, MakePlanner, Recipe, resolve_recipe
from scripts.simulate_packing import WARMUP
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.layout_packing import resolve_packing
from torchtitan_wlb.logger import init_logger
from torchtitan_wlb.packing.quality import measure
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.tuning import candidate_thresholds

PRICES = (0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.22, 0.3, 0.4, 0.6, 0.8, 1.2)
SPLITS = (1, 2, 4, 8)  # drawn of those that the recipe may have


def candidates(recipe: Recipe) -> Iterator[PackingSettings]:
    """Settings to try, plain first."""
    config = recipe.config.model_copy(deep=True)
    config.packing.strategy, config.training.micro_batch_tokens = "wlb", "auto"
    config.training.global_batch_size = recipe.settings.split(1).n
    all_splits = list(resolve_packing(config, recipe.dims, recipe.settings.cost, recipe.settings.seed))
    base = all_splits[0]
    yield replace(base, strategy="plain")
    for s in all_splits:
        if s.n // base.n in SPLITS:
            yield from (replace(s, delay_price=price) for price in PRICES)
    yield from (replace(base, strategy="wlb_paper", thresholds=t) for t in candidate_thresholds(base.seq_len))


def front(rows: list[dict]) -> list[dict]:
    """Rows that no other one beats in both speed and delay, by rising delay."""
    out: list[dict] = []
    for row in sorted(rows, key=lambda r: (r["delay_mean_steps"], -r["over_plain"])):
        if not out or row["over_plain"] > out[-1]["over_plain"]:
            out.append(row)
    return out


def try_all(recipe: Recipe, make_planner: MakePlanner, steps: int, seeds: list[int]) -> list[dict]:
    """A row for every candidate, means over seeds; with a progress bar on a terminal."""
    rows: list[dict] = []
    for s in tqdm(list(candidates(recipe)), unit="setting", leave=False, disable=None):
        model = recipe.step_model(s.n)
        planners = [make_planner(replace(s, seed=seed)) for seed in seeds]
        qualities = [measure(planner, steps, WARMUP, model=model).row() for planner in planners]
        mean = {k: sum(q[k] for q in qualities) / len(seeds) for k in qualities[0]}
        row = {"strategy": s.strategy, "n": s.n, "micro_batch_tokens": s.micro_batch_tokens}
        row |= {"delay_price": s.delay_price, "outlier_thresholds": list(s.thresholds)} | mean
        row["tokens_per_s"] = mean["tokens_per_step"] / mean["step_time_s"]
        row["over_plain"] = row["tokens_per_s"] / (rows or [row])[0]["tokens_per_s"]
        rows.append(row)
    return rows


def plot(fronts: dict[str, list[dict]], target: float, title: str, path: str) -> None:
    """Tokens/s over plain against delay, one line a front."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5))
    for name, rows in fronts.items():
        x, y = ([r[k] for r in rows] for k in ("delay_mean_steps", "over_plain"))
        axis.plot(x, y, "x--" if name.startswith("wlb_paper") else "o-", label=name)
    axis.axhline(1.0, color="0.5", linestyle=":", label="plain")
    axis.axvline(target, color="0.8", zorder=0)
    axis.set(xlabel="mean delay of a token in steps", ylabel="predicted tokens/s over plain", title=title)
    axis.set_xlim(-0.03, 1.2)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", default="")
    parser.add_argument("--plot", default="")
    arguments, rest = parser.parse_known_args(argv)
    recipe = resolve_recipe(load_config(rest), seed=0)
    given, target = arguments.lengths, recipe.config.packing.target_delay
    make_planner = Lengths(given, recipe.config).planner if given else recipe.own_planner()
    rows = try_all(recipe, make_planner, arguments.steps, arguments.seeds)
    fronts: dict[str, list[dict]] = {}
    for row in rows[1:]:
        fronts.setdefault(f"{row['strategy']}, {row['n']} x {row['micro_batch_tokens']:,} tokens", []).append(row)
    fronts = {name: front(each) for name, each in fronts.items()}
    for name, best in fronts.items():
        print(f"\n{name}")
        print(f"{'delay':>7} {'oldest':>7} {'tokens/s':>10} {'imbalance':>10} {'varies':>7}  setting")
        for r in best:
            knob = r["outlier_thresholds"] or r["delay_price"]
            shown = f"{r['delay_mean_steps']:7.3f} {r['delay_max_steps']:7.0f} {r['over_plain']:9.3f}x"
            print(f"{shown} {r['imbalance_mean']:10.4f} {r['tokens_sd']:7.2f}  {knob}")
    if arguments.json:
        write_results(arguments.json, rows, "cpu")
    if arguments.plot:
        flavor, schedule = recipe.config.model.flavor, recipe.config.parallelism.pipeline_parallel_schedule
        title = f"{flavor} at {recipe.settings.seq_len:,}, {recipe.dims}"
        plot(fronts, target, title + (f", {schedule}" if recipe.dims.pp > 1 else ""), arguments.plot)
    within = [r for r in rows if r["strategy"] == "wlb" and r["delay_mean_steps"] <= target]
    if within:
        best_row = max(within, key=lambda r: r["over_plain"])
        n, tokens, price = (best_row[k] for k in ("n", "micro_batch_tokens", "delay_price"))
        print(f"\n[training]\nglobal_batch_size = {n}\nmicro_batch_tokens = {tokens}")
        print(f'\n[packing]\nstrategy = "wlb"\ndelay_price = {price}')


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(sys.argv[1:])

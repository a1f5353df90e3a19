"""The front of balance against delay on a sample of the data: a table, a picture, and the chosen setting as TOML to
paste.

    python scripts/tune_packing.py --job.config_file F.toml [--lengths L.json] [--steps 300] [--json OUT] [--plot P.png]

Without --lengths the recipe's own documents are used (prepared if need be). wlb is tried over delay_price, wlb_paper
over one to three thresholds, both over S_max. Chosen is the best balance whose mean delay is within
packing.target_delay, at the recipe's S_max.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from tqdm import tqdm

from scripts.origin import write_results
from scripts.recipe import Lengths, MakePlanner, resolve_recipe
from scripts.simulate_packing import WARMUP
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.logger import init_logger
from torchtitan_wlb.packing.quality import measure
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.tuning import candidate_thresholds

PRICES = (0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.22, 0.3, 0.4, 0.6, 0.8, 1.2)
FACTORS = (1.25, 1.5, 2.0)


def candidates(base: PackingSettings) -> Iterator[tuple[float, PackingSettings]]:
    """(S_max / seq_len, settings) to try."""
    for factor in FACTORS:
        s = replace(base, s_max=int(factor * base.seq_len) // base.seq_len_multiple * base.seq_len_multiple)
        for price in PRICES:
            yield factor, replace(s, strategy="wlb", delay_price=price)
        for thresholds in candidate_thresholds(base.seq_len):
            yield factor, replace(s, strategy="wlb_paper", thresholds=thresholds)


def front(rows: list[dict]) -> list[dict]:
    """Rows that no other one beats in both time and delay, by rising delay."""
    out: list[dict] = []
    for row in sorted(rows, key=lambda r: (r["delay_mean_steps"], r["time_vs_ideal"])):
        if not out or row["time_vs_ideal"] < out[-1]["time_vs_ideal"]:
            out.append(row)
    return out


def try_all(base: PackingSettings, make_planner: MakePlanner, steps: int, seeds: list[int]) -> list[dict]:
    """Quality of all candidates, means over seeds; with a progress bar on a terminal."""
    rows = []
    for factor, s in tqdm(list(candidates(base)), unit="setting", leave=False, disable=None):
        qualities = [measure(make_planner(replace(s, seed=seed)), steps, WARMUP).row() for seed in seeds]
        mean = {k: sum(q[k] for q in qualities) / len(seeds) for k in qualities[0]}
        knob = {"delay_price": s.delay_price} if s.strategy == "wlb" else {"outlier_thresholds": list(s.thresholds)}
        rows.append({"strategy": s.strategy, "max_len_factor": factor} | knob | mean)
    return rows


def plot(fronts: dict[tuple[str, float], list[dict]], path: str) -> None:
    """Time over perfect balance against delay, one line a front."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5))
    for (strategy, factor), rows in fronts.items():
        x, y = ([r[k] for r in rows] for k in ("delay_mean_steps", "time_vs_ideal"))
        style = "o-" if strategy == "wlb" else "x--"
        color = f"C{FACTORS.index(factor)}"
        axis.plot(x, [100 * (v - 1) for v in y], style, color=color, label=f"{strategy}, S_max {factor} x window")
    axis.set(
        xlabel="mean delay of a token in steps", ylabel="time over perfect balance, %", xlim=(0.15, 1.05), ylim=(0, 25)
    )
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
    base, packing = recipe.settings, recipe.config.packing
    given = arguments.lengths
    make_planner = Lengths(given, recipe.config).planner if given else recipe.own_planner()
    rows = try_all(base, make_planner, arguments.steps, arguments.seeds)
    fronts = {
        (strategy, factor): front([r for r in rows if (r["strategy"], r["max_len_factor"]) == (strategy, factor)])
        for factor in FACTORS
        for strategy in ("wlb", "wlb_paper")
    }
    for (strategy, factor), best in fronts.items():
        print(f"\n{strategy}, S_max {factor} x {base.seq_len:,}")
        print(f"{'delay':>7} {'oldest':>7} {'imbalance':>10} {'time':>7}  setting")
        for r in best:
            knob = r.get("delay_price") or r["outlier_thresholds"]
            shown = f"{r['delay_mean_steps']:7.3f} {r['delay_max_steps']:7.0f} {r['imbalance_mean']:10.4f}"
            print(f"{shown} {r['time_vs_ideal']:7.4f}  {knob}")
    if arguments.json:
        write_results(arguments.json, rows, "cpu")
    if arguments.plot:
        plot(fronts, arguments.plot)
    own = min(FACTORS, key=lambda f: abs(f - packing.max_len_factor))
    within = [r for r in fronts["wlb", own] if r["delay_mean_steps"] <= packing.target_delay]
    if within:
        price = within[-1]["delay_price"]
        print(f'\n[packing]\nstrategy = "wlb"\nmax_len_factor = {own}\ndelay_price = {price}')


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(sys.argv[1:])

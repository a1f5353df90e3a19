"""The front of balance against delay on a sample of the data: a table, a picture, and the chosen setting as TOML to
paste.

    python scripts/tune_packing.py --job.config_file F.toml [--lengths L.json] [--steps 300] [--json OUT] [--plot P.png]

Without --lengths the recipe's own documents are used (prepared if need be). wlb is tried over delay_price, wlb_paper
over one to three thresholds, both over S_max. Chosen is the best balance whose mean delay is within
packing.target_delay, at the recipe's S_max.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from simulate_packing import Stream, recipe_settings  # puts the repository on the path

from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.logger import init_logger
from torchtitan_wlb.packing.planner import StepPlanner
from torchtitan_wlb.packing.quality import measure
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.tuning import candidate_thresholds

WARMUP = 50
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


def try_all(
    base: PackingSettings, planner: Callable[[PackingSettings], StepPlanner], steps: int, seeds: list[int]
) -> list[dict]:
    """Quality of all candidates, means over seeds."""
    rows = []
    for factor, s in candidates(base):
        qualities = [measure(planner(replace(s, seed=seed)), steps, WARMUP).row() for seed in seeds]
        mean = {k: sum(q[k] for q in qualities) / len(seeds) for k in qualities[0]}
        knob = {"delay_price": s.delay_price} if s.strategy == "wlb" else {"outlier_thresholds": list(s.thresholds)}
        rows.append({"strategy": s.strategy, "max_len_factor": factor} | knob | mean)
        if sys.stderr.isatty():
            print(f"\r{len(rows)} settings tried ", end="", file=sys.stderr)
    return rows


def plot(fronts: dict[tuple[str, float], list[dict]], path: str) -> None:
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
    config = load_config(rest)
    base = recipe_settings(config, 0)
    planner = Stream(arguments.lengths, config).planner if arguments.lengths else own_documents(config)
    rows = try_all(base, planner, arguments.steps, arguments.seeds)
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
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    if arguments.plot:
        plot(fronts, arguments.plot)
    own = min(FACTORS, key=lambda f: abs(f - config.packing.max_len_factor))
    within = [r for r in fronts["wlb", own] if r["delay_mean_steps"] <= config.packing.target_delay]
    if within:
        price = within[-1]["delay_price"]
        print(f'\n[packing]\nstrategy = "wlb"\nmax_len_factor = {own}\ndelay_price = {price}')


def own_documents(config: JobConfig) -> Callable[[PackingSettings], StepPlanner]:
    """Planner on the documents of a recipe."""
    from torchtitan_wlb.data.dataloader import make_planner
    from torchtitan_wlb.data.documents import load_documents
    from torchtitan_wlb.data.tokenizer import Tokenizer

    t, m = config.training, config.model
    tokenizer = Tokenizer(m.tokenizer, m.add_bos, m.add_eos)
    return partial(make_planner, load_documents(t, tokenizer, t.dataset, t.dataset_path, t.dataset_weight))


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(sys.argv[1:])
